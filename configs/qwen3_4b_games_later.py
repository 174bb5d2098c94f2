"""The later phase of the games run of Qwen3-4B-Instruct-2507."""

from spade_jax.config import Config
from spade_jax.recipes import change, games_4b_later


def config() -> Config:
    return change(games_4b_later(), run={"dir": "runs/qwen3_4b_games_later"})
