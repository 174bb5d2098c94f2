"""The sections `batch` and `learner` of the configuration: how trajectories become arrays, and the
update.
"""

import math
from dataclasses import dataclass

from spade_jax.settings import Section, require


@dataclass(frozen=True)
class BatchConfig(Section):
    """How trajectories become device arrays."""

    row_tokens: int = 1024  # tokens of one packed row; no trajectory may be longer
    # rows of one forward and backward pass; gradients accumulate over passes
    microbatch_rows: int = 8

    def __post_init__(self) -> None:
        require(self.row_tokens >= 16, "batch.row_tokens", self.row_tokens, "at least 16")
        require(
            self.microbatch_rows >= 1, "batch.microbatch_rows", self.microbatch_rows, "at least 1"
        )


@dataclass(frozen=True)
class LearnerConfig(Section):
    """GRPO and its optimiser (AdamW with the paper's settings)."""

    lr: float = 1e-6  # learning rate
    warmup_steps: int = 0  # steps of linear warm-up
    beta1: float = 0.9  # AdamW first-moment decay
    beta2: float = 0.98  # AdamW second-moment decay
    weight_decay: float = 0.1  # AdamW weight decay, on matrices only
    max_grad_norm: float = 1.0  # global gradient norm clip
    clip_low: float = 0.2  # ratio clip below 1; never active with one update per batch
    clip_high: float = 0.28  # ratio clip above 1; never active with one update per batch
    tis_cap: float = 2.0  # cap of the token-level truncated importance weight
    designer_weight: float = 1.0  # weight of the designer's loss against the agent's
    balance_loss: float = 0.0  # weight of the experts' balance loss, which is 1 at an even load
    router_z_loss: float = 0.0  # weight of the mean square of logsumexp(router scores)

    def __post_init__(self) -> None:
        require(0 <= self.lr < math.inf, "learner.lr", self.lr, "a finite number, 0 or more")
        require(self.warmup_steps >= 0, "learner.warmup_steps", self.warmup_steps, "0 or more")
        for name in ("beta1", "beta2"):
            require(
                0 <= getattr(self, name) < 1, f"learner.{name}", getattr(self, name), "0 to below 1"
            )
        require(self.weight_decay >= 0, "learner.weight_decay", self.weight_decay, "0 or more")
        require(
            self.max_grad_norm > 0, "learner.max_grad_norm", self.max_grad_norm, "a positive number"
        )
        require(0 < self.clip_low < 1, "learner.clip_low", self.clip_low, "between 0 and 1")
        require(self.clip_high > 0, "learner.clip_high", self.clip_high, "a positive number")
        require(self.tis_cap >= 1, "learner.tis_cap", self.tis_cap, "at least 1")
        for name in ("designer_weight", "balance_loss", "router_z_loss"):
            require(getattr(self, name) >= 0, f"learner.{name}", getattr(self, name), "0 or more")
