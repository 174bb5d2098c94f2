"""Control: Qwen3-4B-Instruct-2507 on the problems of RLVE, their difficulty following it."""

from spade_jax.config import Config
from spade_jax.recipes import QWEN3_4B, change, games, rlve


def config() -> Config:
    return change(rlve(games(QWEN3_4B)), run={"dir": "runs/qwen3_4b_rlve"})
