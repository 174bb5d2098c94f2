"""The embedded default at three steps: the same weights and the same code, few and short plays. For
tests.
"""

from pathlib import Path

from spade_jax.config import (
    AgentConfig,
    Config,
    DesignerConfig,
    EngineConfig,
    LearnerConfig,
    RunConfig,
)

ASSETS = Path(__file__).resolve().parents[1] / "assets" / "tiny"


def config() -> Config:
    """Two cycles in three steps; the second designer group is trained when the run ends."""
    return Config(
        run=RunConfig(dir="runs/micro", steps=3, cycle_steps=2, init_from=str(ASSETS)),
        engine=EngineConfig(slots=16, queue=16, page_tokens=16),
        designer=DesignerConfig(designs=6, delay_steps=1),
        agent=AgentConfig(seeds=1, plays=3, max_turns=8),
        learner=LearnerConfig(lr=3e-5),
    )
