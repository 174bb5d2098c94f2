"""Admission of tool programs: the gate of criteria, and what passes all gates."""

import ast
from pathlib import Path
from typing import Any

import pytest

from spade_jax.envs import tool_gate
from spade_jax.envs.admit import admit, admit_public
from spade_jax.envs.limits import Limits
from spade_jax.envs.pool import Pool
from spade_jax.envs.spade_texts import adopt
from spade_jax.envs.tool_task import ToolTask
from spade_jax.envs.tool_use_base_env import ToolUseBaseEnv
from spade_jax.types import Fault, Gate, Outcome, Verdict

PROGRAMS = Path(__file__).parent / "tool_programs"
REFUNDS, LAMPS, IMPORTED = (
    (PROGRAMS / f"{name}.py").read_text() for name in ("refunds", "lamps", "imported")
)


def verdict(shared, program: str, **overrides: Any) -> Verdict:
    arguments: dict[str, Any] = {
        "solution_seeds": range(4),
        "probe_seeds": range(100, 110),
        "max_probe_win_frac": 0.1,
        "max_turns": 12,
        "rng_seed": 0,
        "known": {},
        "duplicate_similarity": 0.95,
    }
    return shared.run(admit(shared.pool, program, **(arguments | overrides)))


@pytest.mark.parametrize("program", [REFUNDS, LAMPS], ids=["refunds", "lamps"])
def test_a_good_task_is_admitted(shared, program: str):
    admitted = verdict(shared, program)
    assert admitted.admitted, admitted
    assert admitted.measures["num_solution_seeds"] == 14
    assert admitted.gates[Gate.CRITERIA] == "passed"


def changed(old: str, new: str, program: str = LAMPS) -> str:
    assert old in program
    return program.replace(old, new)


MET_ON_SEED_3 = changed(
    "def prepare(self, rng):",
    """def reset(self, seed):
        self.start = seed
        return super().reset(seed)

    def prepare(self, rng):""",
).replace("rng.randint(10, 99)", "self.level[self.second] + (self.start - 3) % 7")
ONE_ANSWER = """from tool_task import ToolTask

class AskEnv(ToolTask):
    def prepare(self, rng):
        self.ask(f"What is seven, in room {rng.random()}?", answer=7)

    def solution(self):
        return [self.answer(7)]
"""
REFUSED = {
    "met at reset": (
        changed("self.level[self.second] == self.goal,", "self.level[self.second] > 0,"),
        "criteria",
        "CriterionError: message 1 is met at reset",
    ),
    "met at reset of one seed": (MET_ON_SEED_3, "criteria", "message 1 is met at reset"),
    "cannot be evaluated": (
        changed("self.level[self.second] ==", "self.level['hall'] =="),
        "criteria",
        "CriterionError: message 1 cannot be evaluated: KeyError: 'hall'",
    ),
    "no flag": (
        changed("until=lambda: self.called", "until=lambda: 0 and self.called"),
        "criteria",
        "message 0 evaluates to 0",
    ),
    "cannot be met": (
        changed("== self.goal,", "== self.goal + 0.5,"),
        "solution",
        "do not win",
    ),
    "no solution": (changed("def solution", "def plan"), "parse", "LampsEnv has no solution"),
    "no tool": (changed("def tool_panic", "def panic"), "contract", "no method tool_panic"),
    "tool fails": (changed("self.level[room] = level", "1 / 0"), "solution", "ZeroDivisionError"),
    "one answer for all": (ONE_ANSWER, "variety", "14 seeds have 1 different solutions"),
    "SPADE's base": (IMPORTED, "imports", "import of tool_use_base_env"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_task_is_refused_by_its_gate(shared, name: str):
    program, gate, reason = REFUSED[name]
    refusal = verdict(shared, program)
    assert not refusal.admitted
    assert refusal.gate == gate, refusal
    assert reason in refusal.reason


def test_the_gate_itself(shared):
    check = tool_gate.check_criteria
    assert shared.run(check(shared.pool, REFUNDS, range(40))) is None  # more than a pool holds
    met = REFUSED["met at reset"][0]
    fault = shared.run(check(shared.pool, met, range(3)))
    assert isinstance(fault, Fault)
    assert fault.outcome is Outcome.ENV_ERROR
    assert shared.run(check(shared.pool, REFUSED["no tool"][0], range(3))) is None
    assert shared.run(check(shared.pool, met, ())) is None


IMPORTED_REFUSED = {
    "met at reset": ('state["listed"],', 'state["listed"] is False,', "message 0 is met at reset"),
    "the second is met": ("[scarce, 3] in", "[scarce, 3] not in", "message 1 is met at reset"),
    "cannot be evaluated": (
        'state["list"],',
        'state["lost"],',
        "message 1 cannot be evaluated: KeyError: 'lost'",
    ),
    "no function": ('lambda state: state["listed"],', "None,", "message 0 cannot be evaluated"),
}


def public(shared, code: str) -> Verdict:
    return shared.run(admit_public(shared.pool, adopt(code), seeds=range(3)))


@pytest.mark.parametrize("name", IMPORTED_REFUSED)
def test_the_messages_of_an_imported_task_must_be_open(shared, name: str):
    old, new, reason = IMPORTED_REFUSED[name]
    refusal = public(shared, changed(old, new, IMPORTED))
    assert (refusal.admitted, refusal.gate) == (False, "criteria"), refusal
    assert reason in refusal.reason
    assert refusal.gates[Gate.CRITERIA] == "refused"


def test_an_imported_task_with_open_messages_passes(shared):
    found = public(shared, IMPORTED)
    assert (found.admitted, found.gates[Gate.CRITERIA]) == (True, "passed"), found
    one_seed = "self._current_msg = 0; self._state['listed'] = seed == 1"
    assert public(shared, changed("self._current_msg = 0", one_seed, IMPORTED)).admitted
    without = changed("self._message_criteria = [", "self._unused = [", IMPORTED)
    assert public(shared, without).admitted


def test_what_an_imported_task_says_of_its_messages_is_not_trusted(shared):
    for told in ("'x'", "'[1]'", "'[' * 90000", "5", "1 / 0"):
        said = f"    def criteria_at_reset(self):\n        return {told}\n"
        program = adopt(IMPORTED + "\n" + said)
        check = tool_gate.check_imported(shared.pool, program, ast.parse(program), range(2))
        assert shared.run(check) is None


class Failing(Pool):
    """A pool that cannot serve."""

    async def open(self, program: str, seed: int, replica: int = 0) -> Fault:
        return Fault(Outcome.INFRASTRUCTURE, f"seed {seed}")


def test_a_failure_of_our_own_does_not_pass_the_gate(shared):
    fault = shared.run(tool_gate.check_criteria(Failing(Limits()), LAMPS, range(3)))
    assert fault == Fault(Outcome.INFRASTRUCTURE, "seed 0")
    tree = ast.parse(IMPORTED)
    imported = tool_gate.check_imported(Failing(Limits()), IMPORTED, tree, range(3))
    assert shared.run(imported) == fault


def test_what_the_bases_provide_is_what_they_have():
    for base in (ToolTask, ToolUseBaseEnv):
        assert {"reset", "step"} <= set(vars(base))
        assert tool_gate.PROVIDES[base.__name__] <= set(vars(base))


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("class AEnv(ToolTask): pass", True),
        ("class AEnv(tool_task.ToolTask): pass", True),
        ("class Shop(ToolTask): pass\nclass AEnv(Shop): pass", True),
        ("class AEnv(ToolUseBaseEnv): pass", False),
        ("class AEnv(f()): pass", False),
        ("ToolTask = 1", False),
    ],
)
def test_tool_programs_are_known_by_their_base(program: str, expected: bool):
    assert tool_gate.is_tool_program(ast.parse(program)) == expected
