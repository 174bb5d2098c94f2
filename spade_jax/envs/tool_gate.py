"""What admission asks of a tool program beyond what it asks of any: at reset, every message can be
evaluated and is open.

The check itself is part of `ToolTask.reset`, so it also holds for every seed that is played later,
where it ends the episode as the program's error. Here its result is told apart from other errors of
a reset. That the messages can be met is for the gate `solution` to show.
"""

import ast
import asyncio
from collections.abc import Sequence

from spade_jax.envs.pool import Pool
from spade_jax.types import Fault, Outcome

PROVIDES = {
    "ToolTask": frozenset({"reset", "step"}),
    "ToolUseBaseEnv": frozenset({"step"}),
}
"""Methods that a program's class has from a base of ours, by the name of the base."""


def base_names(node: ast.ClassDef) -> list[str]:
    """The names of a class's bases: B for `B` and for `module.B`."""
    return [
        base.id if isinstance(base, ast.Name) else base.attr
        for base in node.bases
        if isinstance(base, ast.Name | ast.Attribute)
    ]


def is_tool_program(tree: ast.Module) -> bool:
    """Whether a class of the program is a `ToolTask`."""
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return any("ToolTask" in base_names(node) for node in classes)


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
