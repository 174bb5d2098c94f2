"""Control: Qwen3-8B on a fixed pool of games, `--designer.folder`."""

from spade_jax.config import Config
from spade_jax.recipes import QWEN3_8B, change, fixed_pool, games


def config() -> Config:
    return change(fixed_pool(games(QWEN3_8B)), run={"dir": "runs/qwen3_8b_fixed_pool"})
