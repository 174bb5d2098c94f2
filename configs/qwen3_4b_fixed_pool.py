"""Control: Qwen3-4B-Instruct-2507 on a fixed pool of games, `--designer.folder`."""

from spade_jax.config import Config
from spade_jax.recipes import QWEN3_4B, change, fixed_pool, games


def config() -> Config:
    return change(fixed_pool(games(QWEN3_4B)), run={"dir": "runs/qwen3_4b_fixed_pool"})
