"""Control: Qwen3-4B-Instruct-2507 on the problems of RLVE on which its returns move most."""

from spade_jax.config import Config
from spade_jax.recipes import QWEN3_4B, change, games, rlve_by_potential


def config() -> Config:
    return change(rlve_by_potential(games(QWEN3_4B)), run={"dir": "runs/qwen3_4b_rlve_potential"})
