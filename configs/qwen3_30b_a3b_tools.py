"""The paper's tool-use run of Qwen3-30B-A3B-Instruct-2507."""

from spade_jax.config import Config
from spade_jax.recipes import QWEN3_30B_A3B, change, tools


def config() -> Config:
    return change(tools(QWEN3_30B_A3B), run={"dir": "runs/qwen3_30b_a3b_tools"})
