"""The tool-use setting at the size of `configs/tiny.py`: the small policy, taught tool tasks."""

from pathlib import Path

from spade_jax.config import (
    AgentConfig,
    BatchConfig,
    Config,
    DesignerConfig,
    EngineConfig,
    LearnerConfig,
    RunConfig,
    WarmstartConfig,
)
from spade_jax.roles_config import TOOL_SKILLS

ASSETS = Path(__file__).resolve().parents[1] / "assets" / "tiny_tools"
CONTEXT = 1152  # a task and its prompt are longer than a game


def config() -> Config:
    """All six skills of tool use in every cycle; a task's list of tools is a long observation."""
    return Config(
        run=RunConfig(dir="runs/tiny_tools", init_from=str(ASSETS)),
        designer=DesignerConfig(
            prompt="compact_tools", skills=TOOL_SKILLS, skills_per_cycle=6, max_tokens=704
        ),
        agent=AgentConfig(max_turns=10, max_observation_tokens=460),
        engine=EngineConfig(context_tokens=CONTEXT),
        batch=BatchConfig(row_tokens=CONTEXT),
        learner=LearnerConfig(lr=3e-5),
        warmstart=WarmstartConfig(
            out="assets/tiny_tools",
            init_from="assets/tiny",
            steps=700,
            copy_steps=20,
            row_tokens=CONTEXT,
        ),
    )
