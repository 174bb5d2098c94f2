"""The memory is bounded, holds no game twice, and shows what was asked for."""

import json
import random
from dataclasses import replace

import pytest

from spade_jax.config import MemoryConfig
from spade_jax.roles.diversity import Embedder, Likeness
from spade_jax.roles.memory import Memory, Record, render, summary

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


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {"a", "b", "easy"}),
        ({"positives": 0}, {"easy"}),
        ({"negatives": 0}, {"a", "b"}),
        ({"win_high": 0.5}, {"a", "easy"}),  # b, won too often now, is one of two to avoid
        ({"win_high": 0.5, "negatives": 2}, {"a", "b", "easy"}),
        ({"win_low": 0.6, "win_high": 1.0}, {"b", "easy", "a"}),
    ],
)
def test_how_many_are_shown_and_which_teach_are_settings(settings, expected):
    memory = Memory(MemoryConfig(**settings))
    for name, win_rate in (("a", 0.5), ("b", 0.7), ("easy", 1.0)):
        memory.add(record(name, win_rate))
    draws = [memory.draw("Optimization", random.Random(seed)) for seed in range(1, 9)]
    assert expected in [{line.split("Env")[0] for line in lines} for lines in draws]
    taught = {line.split("Env")[0] for lines in draws for line in lines if "regret" in line}
    low, high = memory.config.win_low, memory.config.win_high
    rates = {"a": 0.5, "b": 0.7, "easy": 1.0}
    teaching = {name for name, rate in rates.items() if low <= rate <= high}
    assert taught == (teaching if memory.config.positives else set())


def test_state_round_trip():
    memory = Memory(MemoryConfig())
    memory.add(record("a", 0.25, regret=None))
    other = Memory(MemoryConfig())
    other.restore(memory.state())
    assert other.records == memory.records


def test_a_near_duplicate_replaces_the_older_record():
    alike = Likeness(0.95, 0.98, Embedder())
    program = PROGRAM.replace("DialEnv", "WheelEnv").replace("action", "move")
    memory = Memory(MemoryConfig(size=3))
    memory.add(replace(record("a", 0.5), program=PROGRAM), alike)
    memory.add(replace(record("b", 0.5), program="class BEnv: x = 'quite another game'"), alike)
    memory.add(replace(record("c", 0.1), program=program), alike)
    assert [r.environment_id for r in memory.records] == ["b", "c"]
    # the same environment again is an update, and compared with nothing
    memory.add(replace(record("b", 0.4), program=program), alike)
    assert [(r.environment_id, r.win_rate) for r in memory.records] == [("c", 0.1), ("b", 0.4)]


GOOD = replace(record("good", 0.5, regret=0.25), summary="DialEnv of cheby", program=PROGRAM)
HARD = replace(GOOD, win_rate=0.04, regret=None)
EASY = replace(GOOD, win_rate=0.96)


def test_a_record_is_one_line_by_default():
    assert render(GOOD, True) == "DialEnv of cheby won 0.50, regret 0.25"
    assert render(replace(GOOD, regret=None), True) == "DialEnv of cheby won 0.50, regret unknown"
    assert render(HARD, False) == "DialEnv of cheby was too hard"
    assert render(EASY, False) == "DialEnv of cheby was too easy"


def test_a_summary_says_what_it_was_and_what_it_brought():
    told = "the player won 50% of its plays without a hint"
    about = "DialEnv, 6 lines"
    assert render(GOOD, True, "summary") == f"It taught: {told}, regret 0.25.\n{about}"
    assert render(HARD, False, "summary") == (
        f"To avoid, too hard to learn from: {told.replace('50', '4')}.\n{about}"
    )


def test_a_program_is_shown_whole_but_not_one_to_avoid():
    shown = render(GOOD, True, "program")
    assert shown.endswith(f"regret 0.25.\n```python\n{PROGRAM.strip()}\n```")
    long = PROGRAM + "".join(f"    x{index} = {index}\n" for index in range(400))
    assert long.strip() in render(replace(GOOD, program=long), True, "program")
    avoid = render(EASY, False, "program")
    assert "too easy" in avoid and "DialEnv, 6 lines" in avoid and "```" not in avoid


def test_the_excerpt_of_the_reference_is_2000_characters_and_an_id():
    long = PROGRAM + "".join(f"    x{index} = {index}\n" for index in range(400))
    shown = render(replace(GOOD, program=long), True, "excerpt")
    assert shown == render(replace(GOOD, program=long[:2000]), True, "program")
    assert long[:2000].strip() in shown and long[:2020].strip() not in shown
    told = "the player won 96% of its plays without a hint"
    assert render(EASY, False, "excerpt") == (
        f"To avoid, too easy to learn from: {told}. It was environment good."
    )


@pytest.mark.parametrize(("margin", "expected"), [(0.0, {"a", "b", "c", "d"}), (0.05, {"a", "d"})])
def test_what_is_neither_learnable_nor_to_avoid_is_not_shown(margin, expected):
    """The reference shows records from 0.15 to 0.85, and warns of those below 0.1 or above 0.9."""
    memory = Memory(MemoryConfig(negatives=4, avoid_margin=margin))
    for name, win_rate in (("a", 0.09), ("b", 0.1), ("c", 0.9), ("d", 0.91)):
        memory.add(record(name, win_rate))
    lines = memory.draw("Optimization", random.Random(0))
    assert {line.split("Env")[0] for line in lines} == expected


def test_each_way_to_show_reaches_the_draw():
    shown = {}
    for shows in ("line", "summary", "program", "excerpt"):
        memory = Memory(MemoryConfig(shows=shows))
        memory.add(GOOD)
        easy = replace(EASY, environment_id="easy")
        memory.add(easy)
        shown[shows] = memory.draw("Optimization", random.Random(0))
        assert shown[shows] == [render(GOOD, True, shows), render(easy, False, shows)]
    assert len({str(lines) for lines in shown.values()}) == 4


def test_records_survive_json():
    memory = Memory(MemoryConfig())
    memory.add(replace(GOOD, win_rate=1 / 3))
    other = Memory(MemoryConfig())
    other.restore(json.loads(json.dumps(memory.state())))
    assert other.records == memory.records
