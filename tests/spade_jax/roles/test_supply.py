"""Programs from elsewhere: the order they come in, what a folder must have, and RLVE's window."""

import json
import random
from pathlib import Path

import pytest

from helpers import make_episode
from spade_jax.config import DesignerConfig
from spade_jax.envs.adapters import Listed
from spade_jax.envs.library import FAMILIES
from spade_jax.errors import CheckpointError, ConfigError
from spade_jax.roles.supply import (
    MAX_DIFFICULTY,
    Folder,
    Order,
    Potentials,
    Problems,
    Window,
    raised,
)
from spade_jax.types import Arm, Environment, Outcome, Verdict

TERMS = ("amber", "basalt", "cobalt", "dolmen")
DRAWS = [family.draw(random.Random(0), TERMS, "easy") for family in FAMILIES[:5]]
LISTED = [Listed(name, f"rlve/{name}", "") for name in ("A", "B", "C")]


def test_each_name_comes_once_before_any_comes_again():
    names = [f"n{i}" for i in range(10)]
    order = Order(names, seed=42)
    first = order.draw(4) + order.draw(4)
    assert len(set(first)) == 8
    third = order.draw(4)  # two are left, the others come of the next order
    assert set(third[:2]) == set(names) - set(first)
    assert len(set(third)) == 4
    assert set(third[2:]) | set(order.draw(8)) == set(names)
    assert Order(names, seed=42).draw(10) == first + third[:2]
    assert Order(names, seed=43).draw(10) != first + third[:2]


def test_an_order_goes_on_where_it_stood():
    names = [f"n{i}" for i in range(7)]
    order, other = Order(names, seed=0), Order(names, seed=0)
    order.draw(5)
    other.restore(json.loads(json.dumps(order.state())))
    assert [order.draw(4) for _ in range(5)] == [other.draw(4) for _ in range(5)]
    with pytest.raises(CheckpointError, match="no longer there"):
        Order(names[:3], seed=0).restore({"rounds": 1, "left": ["n0", "n5"]})


def written(folder: Path) -> Path:
    """A folder of programs without a manifest."""
    for index, draw in enumerate(DRAWS):
        (folder / f"game_{index}.py").write_text(draw.program)
    return folder


def from_folder(folder: Path, designs: int) -> DesignerConfig:
    return DesignerConfig(source="folder", folder=str(folder), designs=designs, train=False)


def test_a_folder_of_programs_is_drawn_without_replacement(tmp_path):
    folder = Folder.load(from_folder(written(tmp_path), 2), seed=1)
    found = [supplied for cycle in range(3) for supplied in folder.draw(cycle, 2)]
    assert {supplied.source.program for supplied in found[:5]} == {d.program for d in DRAWS}
    # metrics are named after a skill, and a plain folder names none
    assert {supplied.source.skill for supplied in found} == {"Unnamed"}


def test_the_records_of_a_run_give_skill_and_hint(tmp_path):
    written(tmp_path)
    for index, draw in enumerate(DRAWS):
        record = {"source": {"skill": draw.skill}, "hint": draw.hint}
        (tmp_path / f"game_{index}.json").write_text(json.dumps(record))
    found = Folder.load(from_folder(tmp_path, 5), seed=1).draw(0, 5)
    expected = {(draw.program, draw.skill, draw.hint) for draw in DRAWS}
    assert {(each.source.program, each.source.skill, each.hint) for each in found} == expected


@pytest.mark.parametrize("record", [b"", b"[]", b"{", b"\xff", b'{"source": 3, "hint": 4}'])
def test_a_record_that_cannot_be_read_is_as_none(tmp_path, record):
    (written(tmp_path) / "game_0.json").write_bytes(record)
    found = Folder.load(from_folder(tmp_path, 5), seed=1).draw(0, 5)
    assert {(each.source.skill, each.hint) for each in found} == {("Unnamed", "")}


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda folder: folder / "missing", "is not a folder"),
        (lambda folder: folder, "has 0 programs that can be read, less than designer.designs=6"),
        (written, "has 5 programs that can be read, less than designer.designs=6"),
        (
            lambda folder: (folder / "a.py").write_bytes(b"\xff") and folder,
            "has 0 programs .*the last: a.py: not UTF-8",
        ),
    ],
)
def test_a_folder_without_enough_programs_is_refused_in_one_line(tmp_path, prepare, message):
    with pytest.raises(ConfigError, match=message) as caught:
        Folder.load(from_folder(prepare(tmp_path), 6), seed=0)
    assert "designer.folder" in str(caught.value) and "\n" not in str(caught.value)


def window(low, high, plays=0, wins=0):
    return Window(low, high, plays, wins)


@pytest.mark.parametrize(
    ("before", "wins", "after"),
    [
        (window(0, 0), [True] * 9, window(0, 0, 9, 9)),  # too few to judge
        (window(0, 0, 9, 9), [False], window(0, 1)),  # 9 of 10
        (window(0, 0, 9, 8), [False], window(0, 0)),  # 8 of 10: the counts begin anew
        (window(0, 3), [True] * 10, window(1, 4)),  # four difficulties wide
        (window(2, 4), [True] * 10, window(2, 5)),
        (window(17, MAX_DIFFICULTY), [True] * 10, window(17, MAX_DIFFICULTY)),
    ],
)
def test_a_window_rises_by_wins_at_its_upper_bound(before, wins, after):
    assert raised(before, wins, win_frac=0.9, enough=10, width=4) == after


def problems(*names: str, **settings) -> Problems:
    config = DesignerConfig(
        source="rlve",
        problems=names,
        train=False,
        **{"designs": 2, "window_plays": 2, "window_win_frac": 1.0} | settings,
    )
    return Problems.load(config, 0, lambda package: LISTED)


def plays(environment: Environment, *wins: bool, **fields):
    return [
        make_episode(environment_id=environment.environment_id, episode_return=float(win), **fields)
        for win in wins
    ]


def test_problems_follow_the_plays_at_their_upper_bound():
    supply = problems("A", "B")
    a, b = (
        Environment(each.source, "", 0, each.source.skill, Verdict(True))
        for each in sorted(supply.draw(0, 2), key=lambda each: each.source.skill)
    )
    assert "'difficulty': 0" in a.source.program and "identifier = 'A'" in a.source.program
    void = plays(b, True, outcome=Outcome.INFRASTRUCTURE)
    hinted = plays(b, True, arm=Arm.HINTED)
    supply.observe([a, b], [*plays(a, True, True), *plays(b, True), *void, *hinted])
    windows = supply.state()["windows"]
    assert windows["A"] == {"low": 0, "high": 1, "plays": 0, "wins": 0}
    assert windows["B"] == {"low": 0, "high": 0, "plays": 1, "wins": 1}
    supply.observe([a], plays(a, True, True))  # of difficulty 0, below the bound by now
    assert supply.state()["windows"]["A"]["high"] == 1
    drawn = {each.source.difficulty for i in range(9) for each in supply.draw(i, 2)
             if each.source.skill == "A"}  # fmt: skip
    assert drawn == {"0", "1"}
    other = problems("A", "B")
    other.restore(json.loads(json.dumps(supply.state())))
    assert [other.draw(i, 2) for i in range(3)] == [supply.draw(i, 2) for i in range(3)]


def test_names_that_are_passed_over_keep_their_places():
    order = Order("ABCD", seed=0)
    order.draw(1)
    left = order.state()["left"]
    assert order.draw(1, without=left[:1]) == left[1:2]
    assert order.draw(2) == [left[0], left[2]]
    assert order.draw(3, without="A") and "A" in order.state()["left"]


def test_potentials_by_hand():
    potentials = Potentials(0.35, 0.15)
    for name, steps in {"A": ([0.0], [1.0, 0.0]), "B": ([0.5], [0.5]), "C": ([1.0],)}.items():
        for returns in steps:
            potentials.observe(name, returns)
    # the first mean sets both. A: fast .65 * 0 + .35 * .5 = .175, slow .85 * 0 + .15 * .5 = .075
    state = potentials.state()
    assert state["A"] == pytest.approx({"fast": 0.175, "slow": 0.075})
    assert state["B"] == state["B"] | {"fast": 0.5, "slow": 0.5}
    assert potentials.greatest(3) == ["A"]  # B and C have not moved
    potentials.observe("B", [])  # no play carried a return
    potentials.observe("C", [0.0])
    # C: fast .65 * 1 = .65, slow .85 * 1 = .85: a loss is a move as well, and the greater one
    assert potentials.state()["C"] == pytest.approx({"fast": 0.65, "slow": 0.85})
    assert potentials.greatest(3) == ["C", "A"]
    assert potentials.greatest(1) == ["C"]
    # A again: fast .65 * .175 + .35 = .46375, slow .85 * .075 + .15 = .21375
    potentials.observe("A", [1.0])
    assert potentials.state()["A"] == pytest.approx({"fast": 0.46375, "slow": 0.21375})
    assert potentials.greatest(1) == ["A"]


def test_half_of_the_problems_are_those_whose_returns_move():
    settings = {"controller": "learning_potential", "designs": 4, "problem_difficulty": 3}
    names = "ABCDEFGH"
    listed = [Listed(name, f"rlve/{name}", "") for name in names]
    config = DesignerConfig(source="rlve", train=False, **settings)
    supply = Problems.load(config, 0, lambda package: listed)
    first = supply.draw(0, 4)
    assert {each.source.difficulty for each in first} == {"3"}
    for step in range(2):  # two of them move, one more than the other; one only from loss to loss
        for each, change in zip(first, (0.0, 0.25, 1.0, 0.0), strict=True):
            environment = Environment(each.source, "", 0, each.source.skill, Verdict(True))
            moved = make_episode(
                environment_id=environment.environment_id, episode_return=step * change
            )
            hinted = make_episode(
                environment_id=environment.environment_id, arm=Arm.HINTED, episode_return=1.0
            )
            supply.observe([environment], [moved, hinted])
    drawn = [[each.source.skill for each in supply.draw(cycle, 4)] for cycle in (1, 2, 3)]
    skills = [each.source.skill for each in first]
    for row in drawn:
        assert row[:2] == [skills[2], skills[1]]
        assert len(set(row)) == 4
    # the rest by the order, in which each of the other four comes before the first ones again
    assert {name for row in drawn[:2] for name in row[2:]} == set(names) - set(skills)
    other = Problems.load(config, 0, lambda package: listed)
    other.restore(json.loads(json.dumps(supply.state())))
    assert [other.draw(i, 4) for i in range(4, 8)] == [supply.draw(i, 4) for i in range(4, 8)]


def test_without_names_all_problems_of_the_package_are_drawn():
    assert {each.source.skill for each in problems(designs=3).draw(0, 3)} == {"A", "B", "C"}


@pytest.mark.parametrize(
    ("names", "settings", "message"),
    [
        (("A", "Z"), {}, r"\['Z'\] are not in the package rlve"),
        (("A",), {}, "has 1, less than designer.designs=2"),
        ((), {"designs": 4}, "has 3, less than designer.designs=4"),
    ],
)
def test_problems_that_are_not_there_are_refused(names, settings, message):
    with pytest.raises(ConfigError, match=message):
        problems(*names, **settings)
