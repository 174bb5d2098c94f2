"""The token record: what was sampled, where, in which turn; keys depend on names alone."""

import jax
import numpy as np
import pytest

from spade_jax.rollout.keys import episode_key, named_rng, named_seed
from spade_jax.rollout.record import Recorder
from spade_jax.types import Completion, Stop


def completion(tokens, version=4, stop=Stop.STOP_ID, **options):
    logprobs = -0.25 * np.arange(1, len(tokens) + 1, dtype=np.float32)
    return Completion(np.array(tokens, np.int32), logprobs, 2 * logprobs, stop, version, **options)


def test_two_turns_and_what_follows_the_last():
    record = Recorder()
    assert record.build(1.0) is None
    record.add_prompt(np.array([1, 2, 3], np.int32))
    record.add_completion(completion([7, 8]))
    record.add_prompt(np.array([4], np.int32))
    record.add_completion(completion([9]))
    record.add_prompt(np.array([5, 6], np.int32))  # an observation nobody answered
    assert record.tokens.tolist() == [1, 2, 3, 7, 8, 4, 9, 5, 6] and len(record) == 9
    trajectory = record.build(0.5)
    assert trajectory.tokens.tolist() == [1, 2, 3, 7, 8, 4, 9]
    assert trajectory.loss_mask.tolist() == [False, False, False, True, True, False, True]
    assert trajectory.sampler_logprobs.tolist() == [0, 0, 0, -0.25, -0.5, 0, -0.25]
    assert trajectory.untruncated_logprobs.tolist() == [0, 0, 0, -0.5, -1, 0, -0.5]
    assert trajectory.routing is None
    assert trajectory.turn_index.tolist() == [0, 0, 0, 0, 0, 1, 1]
    assert (trajectory.policy_version, trajectory.temperature) == (4, 0.5)


def test_a_record_is_truncated_when_its_last_completion_ran_out_of_tokens():
    record = Recorder()
    for stop, truncated in (
        (Stop.STOP_ID, False),
        (Stop.MAX_TOKENS, True),
        (Stop.STOP_ID, False),
        (Stop.CONTEXT, True),
    ):
        record.add_completion(completion([7], stop=stop))
        assert record.build(1.0).truncated is truncated


def test_forced_ids_are_not_taught():
    record = Recorder()
    record.add_prompt(np.array([1], np.int32))
    forced = np.array([False, True, True, False, True])
    record.add_completion(completion([5, 6, 7, 8, 9], forced=forced))
    trajectory = record.build(1.0)
    assert trajectory is not None
    assert trajectory.tokens.tolist() == [1, 5, 6, 7, 8]
    assert trajectory.loss_mask.tolist() == [False, True, False, False, True]
    assert trajectory.num_sampled == 2
    record.add_completion(completion([5, 6], forced=np.array([False, True])), trained=False)
    masked = record.build(1.0)
    assert masked is not None and masked.loss_mask.sum() == 2
    assert (masked.num_untrained, masked.num_sampled) == (1, 3)
    nothing = Recorder()
    nothing.add_completion(completion([]))  # out of time before the first token
    assert nothing.build(1.0) is None


def test_the_first_choice_of_a_token_is_kept():
    def routing(length: int, base: int) -> np.ndarray:
        return (base + np.arange(length * 2).reshape(length, 2, 1)).astype(np.uint8)

    record = Recorder()
    record.add_prompt(np.array([1, 2], np.int32))
    record.add_completion(completion([7, 8], routing=routing(3, 0)))
    record.add_prompt(np.array([3], np.int32))
    record.add_completion(completion([9], routing=routing(5, 100)))
    trajectory = record.build(1.0)
    assert trajectory is not None and trajectory.routing is not None
    assert trajectory.routing[:, 0, 0].tolist() == [0, 2, 4, 106, 108, 0]


def test_what_was_sampled_under_unknown_choices_is_not_taught():
    """A completion that ran out of time has no choices, so its tokens cannot be replayed."""
    record = Recorder()
    record.add_prompt(np.array([5, 6]))
    record.add_completion(completion([7, 8], routing=np.zeros((3, 1, 2), np.int16)))
    record.add_completion(completion([9, 10]))
    trajectory = record.build(1.0)
    assert trajectory is not None and trajectory.routing is not None
    # 8 was sampled behind the choices of 7, which are known; 9 behind those of 8, which are not.
    assert trajectory.loss_mask.tolist() == [False, False, True, True, False, False]
    assert trajectory.routing.shape == (6, 1, 2)


def test_no_episode_crosses_an_update():
    record = Recorder()
    record.add_completion(completion([1]))
    with pytest.raises(ValueError, match="versions 4 and 5"):
        record.add_completion(completion([2], version=5))


def test_names_make_seeds_and_keys():
    # the CRC-32 of "3/a/1" modulo 2**31, as zlib gives it in any process
    assert named_seed(3, "a", 1) == 1378161507 != named_seed(3, "a", 2)
    assert named_rng(3, "a").random() == named_rng(3, "a").random() != named_rng(4, "a").random()
    drawn = map(episode_key, (0, 0, 1), ("x", "x", "x"))
    keys = [np.asarray(jax.random.key_data(key)) for key in drawn]
    assert np.array_equal(keys[0], keys[1]) and not np.array_equal(keys[0], keys[2])
