"""`qwen3_8b_tools` with the reference's behaviour where a setting can restore it."""

from spade_jax.config import Config
from spade_jax.recipes import QWEN3_8B, change, paper_exact, tools


def config() -> Config:
    return change(paper_exact(tools(QWEN3_8B)), run={"dir": "runs/qwen3_8b_tools_exact"})
