"""The paper's tool-use run of Qwen3-8B, thinking in both roles."""

from spade_jax.config import Config
from spade_jax.recipes import QWEN3_8B, change, tools


def config() -> Config:
    return change(tools(QWEN3_8B), run={"dir": "runs/qwen3_8b_tools"})
