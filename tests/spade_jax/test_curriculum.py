"""What self-play carries between steps survives JSON to the last bit, and tallies count what they
say.
"""

import json

import numpy as np
import pytest

from helpers import make_episode, make_trajectory
from spade_jax import measures
from spade_jax.config import MemoryConfig
from spade_jax.curriculum import (
    LEARNABLE_STEPS,
    Curriculum,
    Difficulties,
    Pending,
    PlayTally,
    banded,
)
from spade_jax.errors import CheckpointError
from spade_jax.rewards.learning_potential import Tracker
from spade_jax.roles.diversity import Window, Written
from spade_jax.roles.memory import Memory, Record
from spade_jax.telemetry import metrics
from spade_jax.types import (
    Arm,
    Design,
    Environment,
    EnvironmentSource,
    Gate,
    GateResult,
    Outcome,
    Verdict,
    to_json,
)

SOURCE = EnvironmentSource("class AEnv: pass\n", "Optimization", "easy", "doc")


def full_curriculum():
    verdict = Verdict(
        True,
        measures={"num_solution_seeds": 5, "random_win_frac": 0.05},
        gates={Gate.PARSE: GateResult.PASSED, Gate.RANDOM: GateResult.PASSED},
    )
    logprobs = np.array([0, 0, 0, -0.1234567, -1e-8], np.float32)
    design = Design(
        "c0000_d000",
        0,
        "Optimization",
        "easy",
        "doc",
        "text",
        make_trajectory(sampler_logprobs=logprobs),
        verdict,
        SOURCE,
        "hint",
        "hint text",
    )
    refused = Design(
        "c0000_d001", 0, "Optimization", "easy", "doc", "?", make_trajectory(), Verdict(False), None
    )
    tally = PlayTally()
    tally.add(make_episode(seed=2**31 - 1, play_index=3), paired=True)
    tally.add(
        make_episode(outcome=Outcome.TIMEOUT, episode_return=None, arm=Arm.HINTED), paired=True
    )
    curriculum = Curriculum(Memory(MemoryConfig()))
    curriculum.memory.add(Record("id", "Optimization", "AEnv", 0.1, None, 0, SOURCE.program))
    curriculum.environments = [Environment(SOURCE, "hint", 0, "c0000_d000", verdict)]
    curriculum.pending = [Pending(0, 4, [design, refused], {SOURCE.environment_id: tally})]
    curriculum.trackers = {"Optimization": Tracker(0.1 + 0.2, -1e-17)}
    curriculum.difficulties = [Difficulties(3, 2, 1, 12)]
    curriculum.window = Window([Written(SOURCE.program, "Optimization", 0, True, True, 2)], ["x"])
    return curriculum


def test_state_survives_json_exactly():
    curriculum = full_curriculum()
    state = json.loads(json.dumps(curriculum.state()))
    other = Curriculum(Memory(MemoryConfig()))
    other.restore(state)
    assert other.state() == curriculum.state()
    restored = other.pending[0].designs[0].trajectory
    original = curriculum.pending[0].designs[0].trajectory
    for name in ("tokens", "loss_mask", "sampler_logprobs", "turn_index"):
        left, right = getattr(restored, name), getattr(original, name)
        assert left.dtype == right.dtype and np.array_equal(left, right)
    assert other.environments == curriculum.environments
    assert other.trackers == curriculum.trackers
    assert other.difficulties == curriculum.difficulties
    assert other.window == curriculum.window
    assert other.pending[0].tallies == curriculum.pending[0].tallies
    assert other.pending[0].tallies[SOURCE.environment_id].pairs(Arm.UNHINTED) == {
        (2**31 - 1, 3): 1.0
    }


@pytest.mark.parametrize(
    "damage",
    [
        {"memory": [{"x": 1}]},
        {"pending": [{}]},
        {"environments": 3},
        {"trackers": {"Optimization": {"fast": 0.0}}},
        {"trackers": []},
        {"difficulties": [[1]]},
        {"window": {"written": []}},
    ],
)
def test_a_state_of_another_version_is_refused(damage):
    state = full_curriculum().state() | damage
    with pytest.raises(CheckpointError, match="another version"):
        Curriculum(Memory(MemoryConfig())).restore(state)


def test_tally_counts_scored_unhinted_plays_only():
    tally = PlayTally()
    assert tally.win_rate is None
    tally.add(make_episode(), paired=True)
    tally.add(make_episode(play_index=1, episode_return=0.5), paired=False)
    tally.add(make_episode(play_index=2, arm=Arm.HINTED), paired=True)
    tally.add(make_episode(outcome=Outcome.TIMEOUT, episode_return=None), paired=False)
    assert tally.scored == [(0, 0, 1.0, True), (0, 0, 0.5, False)]
    assert (tally.win_rate, tally.faults) == (0.5, ["timeout"])
    tally.add(make_episode(step=3, seed=9, episode_return=0.0), paired=False)
    assert tally.by_step() == {0: [1.0, 0.5], 3: [0.0]}
    assert tally.pairs(Arm.UNHINTED) == {(0, 0): 1.0}
    assert tally.pairs(Arm.HINTED) == {(0, 2): 1.0}


def test_the_learnable_band_includes_its_bounds():
    assert banded([]) == (0, 0, 0)
    assert banded([0.2, 0.8, 0.19, 0.81, 1.0]) == (2, 2, 1)


def test_difficulties_are_of_one_step_and_unfilled_places_count():
    """Of four places, one environment is half won, one always, and one brought no play that
    counts.
    """
    curriculum = Curriculum(Memory(MemoryConfig()))
    half = [make_episode(environment_id="half", episode_return=value) for value in (1.0, 0.0)]
    hinted = [make_episode(environment_id="half", arm=Arm.HINTED)] * 9
    void = make_episode(environment_id="void", outcome=Outcome.INFRASTRUCTURE, episode_return=None)
    curriculum.observe([*half, *hinted, make_episode(environment_id="easy"), void], 4)
    assert curriculum.difficulties == [Difficulties(learnable=1, easy=1, hard=0, capacity=4)]
    curriculum.observe([make_episode(environment_id="half", episode_return=0.0)], 4)
    assert curriculum.difficulties[-1] == (0, 0, 1, 4)
    logged = metrics.check(measures.difficulties(curriculum.difficulties))
    shares = {"learnable": 1 / 8, "easy": 1 / 8, "hard": 1 / 8, "unfilled": 5 / 8}
    assert logged == {
        **{f"curriculum/{name}_frac": share for name, share in shares.items()},
        **{f"curriculum/{name}_frac_count": 8 for name in shares},
    }
    for _ in range(LEARNABLE_STEPS):
        curriculum.observe(half, 4)
    assert curriculum.difficulties == [(1, 0, 0, 4)] * 16
    assert measures.difficulties(curriculum.difficulties)["curriculum/learnable_frac"] == 0.25
    assert measures.difficulties([]) == {}


def test_to_json_is_plain():
    assert to_json({Arm.HINTED: (np.float32(0.1), np.arange(2), Outcome.FINISHED)}) == {
        "hinted": [float(np.float32(0.1)), [0, 1], "finished"]
    }
