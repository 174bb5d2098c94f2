"""`qwen3_4b_tools` with the reference's behaviour where a setting can restore it."""

from spade_jax.config import Config
from spade_jax.recipes import change, paper_exact, tools_4b


def config() -> Config:
    return change(paper_exact(tools_4b()), run={"dir": "runs/qwen3_4b_tools_exact"})
