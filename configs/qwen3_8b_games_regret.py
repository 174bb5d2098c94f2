"""`qwen3_8b_games` with the regret alone as the designer's reward."""

from spade_jax.config import Config
from spade_jax.recipes import QWEN3_8B, change, games


def config() -> Config:
    return change(
        games(QWEN3_8B), run={"dir": "runs/qwen3_8b_games_regret"}, reward={"kind": "regret"}
    )
