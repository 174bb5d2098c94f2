"""The embedded default: a 7 M-parameter policy that shows the whole loop on two CPU cores in
minutes.
"""

from pathlib import Path

from spade_jax.config import BatchConfig, Config, EngineConfig, LearnerConfig, RunConfig

ASSETS = Path(__file__).resolve().parents[1] / "assets" / "tiny"


def config() -> Config:
    """Defaults of every section, with a learning rate for a small model and small pages."""
    return Config(
        run=RunConfig(dir="runs/tiny", init_from=str(ASSETS)),
        # With these two a CPU samples and learns with the same bits (docs/measurements.md).
        engine=EngineConfig(page_tokens=16, slots=64),
        batch=BatchConfig(align_tokens=64),
        learner=LearnerConfig(lr=3e-5),
    )
