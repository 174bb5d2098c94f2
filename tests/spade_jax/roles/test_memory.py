"""The memory is bounded, holds each environment once, and shows what was asked for."""

import random

from spade_jax.config import MemoryConfig
from spade_jax.roles.memory import Memory, Record, summary

PROGRAM = """
import random
class DialEnv:
    ITEMS = ["cheby", "ripple", "band", "four"]
    def step(self, action):
        return "text here", 0.0, False, False, {}
"""


def record(name, win_rate, regret=0.1, skill="Optimization", cycle=0):
    return Record(name, skill, f"{name}Env of x", win_rate, regret, cycle, f"name = {name!r}")


def test_summary_names_class_and_first_words():
    assert summary(PROGRAM) == "DialEnv of cheby, ripple, band"
    assert summary("class AEnv:\n    pass") == "AEnv"


def test_oldest_go_first_and_a_second_record_replaces_the_first():
    memory = Memory(MemoryConfig(size=2))
    memory.add(record("a", 0.5))
    memory.add(record("b", 0.5))
    memory.add(record("a", 0.6))
    assert [(r.environment_id, r.win_rate) for r in memory.records] == [("b", 0.5), ("a", 0.6)]
    memory.add(record("c", 0.5))
    assert [r.environment_id for r in memory.records] == ["a", "c"]


def test_size_zero_turns_memory_off():
    memory = Memory(MemoryConfig(size=0))
    memory.add(record("a", 0.5))
    assert memory.draw("Optimization", random.Random(0)) == []


def test_draw_shows_learnable_records_by_regret_and_one_to_avoid():
    memory = Memory(MemoryConfig(positives=2, negatives=1))
    for index in range(12):
        memory.add(record(f"l{index}", 0.5, regret=index / 10))
    memory.add(record("unknown", 0.5, regret=None))
    memory.add(record("easy", 1.0))
    memory.add(record("other", 0.5, skill="Spatial Reasoning"))
    shown = {
        line for seed in range(60) for line in memory.draw("Optimization", random.Random(seed))
    }
    names = {line.split("Env")[0] for line in shown}
    # the best ten of thirteen learnable ones, never the two of lowest regret or the unmeasured one
    assert names == {f"l{index}" for index in range(2, 12)} | {"easy"}
    assert "easyEnv of x was too easy" in shown
    assert "l11Env of x won 0.50, regret 1.10" in shown
    assert len(memory.draw("Optimization", random.Random(0))) == 3


def test_state_round_trip():
    memory = Memory(MemoryConfig())
    memory.add(record("a", 0.25, regret=None))
    other = Memory(MemoryConfig())
    other.restore(memory.state())
    assert other.records == memory.records
