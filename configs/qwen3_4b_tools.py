"""The paper's tool-use run of Qwen3-4B-Instruct-2507."""

from spade_jax.config import Config
from spade_jax.recipes import change, tools_4b


def config() -> Config:
    return change(tools_4b(), run={"dir": "runs/qwen3_4b_tools"})
