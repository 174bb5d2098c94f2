"""Control: Qwen3-8B on the problems of RLVE, their difficulty following it."""

from spade_jax.config import Config
from spade_jax.recipes import QWEN3_8B, change, games, rlve


def config() -> Config:
    return change(rlve(games(QWEN3_8B)), run={"dir": "runs/qwen3_8b_rlve"})
