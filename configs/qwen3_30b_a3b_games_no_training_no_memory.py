"""Ablation: `qwen3_30b_a3b_games` with a designer that is not trained, though its weights move
with the agent's, and without memory.
"""

from spade_jax.config import Config
from spade_jax.recipes import QWEN3_30B_A3B, change, games


def config() -> Config:
    return change(
        games(QWEN3_30B_A3B),
        run={"dir": "runs/qwen3_30b_a3b_games_no_training_no_memory"},
        designer={"train": False},
        memory={"size": 0},
    )
