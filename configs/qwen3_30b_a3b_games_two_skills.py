"""Ablation: `qwen3_30b_a3b_games` with two skills."""

from spade_jax.config import Config
from spade_jax.recipes import QWEN3_30B_A3B, change, games, two_skills


def config() -> Config:
    return change(
        two_skills(games(QWEN3_30B_A3B)), run={"dir": "runs/qwen3_30b_a3b_games_two_skills"}
    )
