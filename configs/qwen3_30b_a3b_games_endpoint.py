"""Control: as `qwen3_30b_a3b_games`, but another model behind an endpoint writes the environments,
from the same documents and memory (`--endpoint.url`, `--endpoint.model`, `--endpoint.key-env`).
"""

from spade_jax.config import Config
from spade_jax.recipes import QWEN3_30B_A3B, change, games, other_designer


def config() -> Config:
    return change(
        other_designer(games(QWEN3_30B_A3B)), run={"dir": "runs/qwen3_30b_a3b_games_endpoint"}
    )
