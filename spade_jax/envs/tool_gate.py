"""What admission asks of a tool program beyond what it asks of any: at reset, every message can be
evaluated and is open.

The check itself is part of `ToolTask.reset`, so it also holds for every seed that is played later,
where it ends the episode as the program's error. Here its result is told apart from other errors of
a reset. That the messages can be met is for the gate `solution` to show.

Programs on SPADE's own base keep criteria that nothing evaluates at reset, so they are asked for
them (`check_imported`). They were written for a laxer rule, and a message counts as closed only if
it is on every seed.
"""

import ast
import asyncio
import functools
import json
from collections.abc import Sequence

from spade_jax.envs.pool import Pool
from spade_jax.types import Fault, Outcome

PROVIDES = {
    "ToolTask": frozenset({"reset", "step"}),
    "ToolUseBaseEnv": frozenset({"step"}),
}
"""Methods that a program's class has from a base of ours, by the name of the base."""
_MAX_REASON = 240
_AUDIT = """

# -- tells what the messages ask at reset
class CriteriaEnv:
    def reset(self, seed):
        env = {name}()
        env.reset(seed)
        return getattr(env, "_game", env).criteria_at_reset()
"""


def base_names(node: ast.ClassDef) -> list[str]:
    """The names of a class's bases: B for `B` and for `module.B`."""
    return [
        base.id if isinstance(base, ast.Name) else base.attr
        for base in node.bases
        if isinstance(base, ast.Name | ast.Attribute)
    ]


def is_tool_program(tree: ast.Module, base: str = "ToolTask") -> bool:
    """Whether a class of the program builds on a base of ours."""
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return any(base in base_names(node) for node in classes)


@functools.lru_cache(maxsize=1024)
def uses_tools(program: str) -> bool:
    """Whether a program is played by calling tools, by its bases; no Python is not."""
    try:
        tree = ast.parse(program)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return any(is_tool_program(tree, base) for base in PROVIDES)


async def check_criteria(pool: Pool, program: str, seeds: Sequence[int]) -> Fault | None:
    """The first fault of a criterion at reset, or of our own side, over `seeds`; None without one.

    Other faults are left to the gates after this one.
    """
    faults = await asyncio.gather(*(_reset_fault(pool, program, seed) for seed in seeds))
    return next(filter(None, faults), None)


async def _reset_fault(pool: Pool, program: str, seed: int) -> Fault | None:
    opened = await pool.open(program, seed)
    if not isinstance(opened, Fault):
        await opened.close()
        return None
    is_criterion = opened.outcome is Outcome.ENV_ERROR and "CriterionError: " in opened.detail
    return opened if is_criterion or opened.outcome is Outcome.INFRASTRUCTURE else None


async def check_imported(
    pool: Pool, program: str, tree: ast.Module, seeds: Sequence[int]
) -> Fault | None:
    """The same for a program on SPADE's base: the fault of the first message that is open on none
    of the seeds. Seeds that cannot be reset are left to the gates after this one."""
    names = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    name = next(name for name in reversed(names) if name.endswith("Env"))
    audit = program + _AUDIT.format(name=name)
    asked = await asyncio.gather(*(_closed(pool, audit, seed) for seed in seeds))
    told = [each for each in asked if isinstance(each, list)]
    for index, reasons in enumerate(zip(*told, strict=False)):
        if all(reasons):
            why = "".join(c if c.isprintable() else "?" for c in reasons[0][:_MAX_REASON])
            return Fault(Outcome.ENV_ERROR, f"message {index} {why}")
    ours = (each for each in asked if isinstance(each, Fault))
    return next((each for each in ours if each.outcome is Outcome.INFRASTRUCTURE), None)


async def _closed(pool: Pool, audit: str, seed: int) -> list[str] | Fault:
    """Why each message is not open at reset, as the program says; "" for one that is."""
    opened = await pool.open(audit, seed)
    if isinstance(opened, Fault):
        return opened
    await opened.close()
    try:
        told = json.loads(opened.observation)
    except (ValueError, RecursionError):
        told = None
    if not isinstance(told, list) or not all(isinstance(reason, str) for reason in told):
        return Fault(Outcome.SCHEMA, "its criteria are no list")
    return told
