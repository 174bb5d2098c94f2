"""Ablation: `qwen3_30b_a3b_games` with the win-rate anchor alone as the designer's reward."""

from spade_jax.config import Config
from spade_jax.recipes import QWEN3_30B_A3B, change, games


def config() -> Config:
    return change(
        games(QWEN3_30B_A3B),
        run={"dir": "runs/qwen3_30b_a3b_games_solve_rate"},
        reward={"kind": "solve_rate"},
    )
