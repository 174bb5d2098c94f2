"""The paper's games run of Qwen3-8B, thinking in both roles."""

from spade_jax.config import Config
from spade_jax.recipes import QWEN3_8B, change, games


def config() -> Config:
    return change(games(QWEN3_8B), run={"dir": "runs/qwen3_8b_games"})
