"""The paper's games run of Qwen3-4B-Instruct-2507."""

from spade_jax.config import Config
from spade_jax.recipes import QWEN3_4B, change, games


def config() -> Config:
    return change(games(QWEN3_4B), run={"dir": "runs/qwen3_4b_games"})
