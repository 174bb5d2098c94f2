"""Ablation: `qwen3_30b_a3b_games` without documents."""

from spade_jax.config import Config
from spade_jax.recipes import QWEN3_30B_A3B, change, games, without_corpus


def config() -> Config:
    return change(
        without_corpus(games(QWEN3_30B_A3B)), run={"dir": "runs/qwen3_30b_a3b_games_no_corpus"}
    )
