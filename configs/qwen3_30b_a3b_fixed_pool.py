"""Control: Qwen3-30B-A3B-Instruct-2507 on a fixed pool of games, `--designer.folder`."""

from spade_jax.config import Config
from spade_jax.recipes import QWEN3_30B_A3B, change, fixed_pool, games


def config() -> Config:
    return change(fixed_pool(games(QWEN3_30B_A3B)), run={"dir": "runs/qwen3_30b_a3b_fixed_pool"})
