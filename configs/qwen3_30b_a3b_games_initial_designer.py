"""Ablation: `qwen3_30b_a3b_games` with games written by a frozen copy of the starting weights."""

from spade_jax.config import Config
from spade_jax.recipes import QWEN3_30B_A3B, change, games


def config() -> Config:
    return change(
        games(QWEN3_30B_A3B),
        run={"dir": "runs/qwen3_30b_a3b_games_initial_designer"},
        designer={"train": False, "policy": "initial"},
    )
