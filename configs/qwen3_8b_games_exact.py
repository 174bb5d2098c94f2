"""`qwen3_8b_games` with the reference's behaviour where a setting can restore it."""

from spade_jax.config import Config
from spade_jax.recipes import QWEN3_8B, change, games, paper_exact


def config() -> Config:
    return change(paper_exact(games(QWEN3_8B)), run={"dir": "runs/qwen3_8b_games_exact"})
