"""Control: Qwen3-30B-A3B-Instruct-2507 on the problems of RLVE, their difficulty following it."""

from spade_jax.config import Config
from spade_jax.recipes import QWEN3_30B_A3B, change, games, rlve


def config() -> Config:
    return change(rlve(games(QWEN3_30B_A3B)), run={"dir": "runs/qwen3_30b_a3b_rlve"})
