import numpy as np

from spade_jax.rollout.cache import SlotTable


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def filled(*sequences: np.ndarray, slots: int | None = None) -> SlotTable:
    """A table whose slots 0, 1, ... hold the sequences, released in that order."""
    table = SlotTable(slots or len(sequences), 8)
    for slot, hit in table.acquire(list(sequences)):
        table.append(slot, sequences[slot][hit:])
        table.release(slot)
    return table


def test_next_turn_finds_its_own_slot():
    table = filled(ids(1, 2, 3), ids(1, 2, 4, 5))
    assert table.acquire([ids(1, 2, 4, 5, 6, 7)]) == [(1, 4)]
    assert table.length(1) == 4
    table.append(1, ids(6, 7))
    assert table.length(1) == 6
    assert table.num_idle == 1


def test_continuations_choose_before_strangers():
    table = filled(ids(1, 2, 3, 4), ids(1, 2, 9))
    # The first sequence shares most with slot 0, but the second one continues it.
    assert table.acquire([ids(1, 2, 3, 7), ids(1, 2, 3, 4, 5)]) == [(1, 2), (0, 4)]


def test_longest_shared_prefix_wins_then_least_recently_used():
    table = filled(ids(1, 2, 3), ids(1, 2, 8), ids(5, 5, 5))
    assert table.acquire([ids(1, 2, 8, 9)]) == [(1, 3)]
    table.release(1)
    assert table.acquire([ids(7)]) == [(0, 0)]
    assert table.acquire([ids(7, 7)]) == [(2, 0)]


def test_last_token_is_always_run():
    assert filled(ids(1, 2, 3)).acquire([ids(1, 2, 3)]) == [(0, 2)]
    assert filled(ids(1, 2, 3)).acquire([ids(1, 2)]) == [(0, 1)]


def test_tokens_beyond_the_hit_are_forgotten():
    table = filled(ids(1, 2, 3, 4))
    assert table.acquire([ids(1, 2, 9)]) == [(0, 2)]
    table.release(0)  # given up before anything was written
    assert table.acquire([ids(1, 2, 3, 4)]) == [(0, 2)]


def test_clear_forgets_everything():
    table = filled(ids(1, 2, 3), slots=2)
    table.clear()
    assert table.acquire([ids(1, 2, 3)]) == [(0, 0)]
