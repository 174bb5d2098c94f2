"""The sections `batch` and `learner` of the configuration: how trajectories become arrays, and the
update.
"""

import math
from dataclasses import dataclass
from typing import Literal

from spade_jax.errors import ConfigError
from spade_jax.settings import Section, require

Memory = Literal["device", "host"]


@dataclass(frozen=True)
class BatchConfig(Section):
    """How trajectories become device arrays."""

    row_tokens: int = 1024  # tokens of one packed row; no trajectory may be longer
    # tokens of all rows that one device has in a forward and backward pass; gradients accumulate
    # over passes
    device_tokens: int = 8192
    # trajectories of a row begin at multiples of this (not those of a warm start, which nobody
    # sampled). At 64 a CPU, which sums attention over as many keys at a time, computes the
    # log-probabilities that it sampled with to the bit
    align_tokens: int = 1

    def __post_init__(self) -> None:
        require(self.row_tokens >= 16, "batch.row_tokens", self.row_tokens, "at least 16")
        require(
            1 <= self.align_tokens <= self.row_tokens,
            "batch.align_tokens",
            self.align_tokens,
            f"between 1 and batch.row_tokens={self.row_tokens}",
        )
        if self.device_tokens < self.row_tokens:
            raise ConfigError(
                f"batch.device_tokens={self.device_tokens} does not hold one row of "
                f"batch.row_tokens={self.row_tokens}; set batch.device_tokens to at least "
                f"{self.row_tokens}"
            )

    @property
    def device_rows(self) -> int:
        """Rows of one device in one pass."""
        return self.device_tokens // self.row_tokens


@dataclass(frozen=True)
class LearnerConfig(Section):
    """The loss and its optimiser (AdamW with the paper's settings). The formulas of the losses are
    in `learner.losses`.
    """

    # grpo: clipped token ratios; dr_grpo: the same on unscaled advantages with a constant
    # normaliser; gspo: clipped ratios of whole sequences; cispo: clipped and detached ratios;
    # rloo: the plain policy gradient on leave-one-out advantages
    loss: Literal["grpo", "dr_grpo", "gspo", "cispo", "rloo"] = "grpo"
    # mean of a role's token losses: over all its tokens, over the means of its sequences, over the
    # means of its groups, or their sum over sequences * constant_tokens
    reduction: Literal["token", "sequence", "group", "constant"] = "token"
    constant_tokens: int = 1024  # what a sequence counts as with reduction=constant
    clip_low: float = 0.2  # ratio clip below 1; never active with one update per rollout
    clip_high: float = 0.28  # ratio clip above 1; never active with one update per rollout
    dual_clip: float = 0.0  # most loss per unit of a negative advantage (grpo, dr_grpo); 0: no cap
    # importance weight of old over sampler: of each token, or of the whole sequence
    tis: Literal["token", "sequence", "none"] = "token"
    tis_cap: float = 2.0  # cap of that weight
    # sampler log-probabilities in it: of the distribution sampled from, or before truncation
    tis_logprobs: Literal["sampled", "untruncated"] = "sampled"
    kl_coef: float = 0.0  # weight of the KL to the frozen starting weights
    kl_kind: Literal["k1", "k2", "k3"] = "k3"  # its estimator
    reference_memory: Memory = "device"  # where the frozen weights wait while they are not used
    entropy_coef: float = 0.0  # weight of the entropy bonus
    # trajectories that ran out of tokens: trained, or only counted in the baseline of their group
    overlong: Literal["train", "mask"] = "train"
    # groups of equal rewards: left out, or kept for what KL, entropy and token counts make of them
    zero_variance: Literal["drop", "keep"] = "drop"
    router_replay: bool = False  # the experts that the sampler chose, instead of choosing again
    minibatches: int = 1  # parts of a rollout, each of one optimiser step
    epochs: int = 1  # passes over these parts
    lr: float = 1e-6  # learning rate
    schedule: Literal["constant", "linear", "cosine"] = "constant"  # after the warm-up
    warmup_steps: int = 0  # optimiser steps of linear warm-up
    decay_steps: int = 0  # optimiser steps, warm-up included, until linear or cosine reach zero
    beta1: float = 0.9  # AdamW first-moment decay
    beta2: float = 0.98  # AdamW second-moment decay
    weight_decay: float = 0.1  # AdamW weight decay, on matrices only
    max_grad_norm: float = 1.0  # global gradient norm clip
    moments_dtype: Literal["float32", "bfloat16"] = "float32"  # what both moments are stored in
    optimizer_memory: Memory = "device"  # where the moments wait between updates
    max_skipped: int = 3  # updates skipped in a row, for gradients not finite, that end the run
    # rank of the adapters, in float32, that are trained instead of the weights; 0: none
    lora_rank: int = 0
    lora_alpha: float = 32.0  # adapters are multiplied by lora_alpha / lora_rank
    lora_on: Literal["attention", "experts", "all"] = "all"  # the matrices that have adapters
    head_tokens: int = 512  # tokens whose scores of the vocabulary exist at once
    designer_weight: float = 1.0  # weight of the designer's loss against the agent's
    balance_loss: float = 0.0  # weight of the experts' balance loss, which is 1 at an even load
    router_z_loss: float = 0.0  # weight of the mean square of logsumexp(router scores)

    def __post_init__(self) -> None:
        def check(name: str, condition: bool, expected: str) -> None:
            require(condition, f"learner.{name}", getattr(self, name), expected)

        check("lr", 0 <= self.lr < math.inf, "a finite number, 0 or more")
        for name in ("beta1", "beta2"):
            check(name, 0 <= getattr(self, name) < 1, "0 to below 1")
        for name in ("max_grad_norm", "clip_high", "lora_alpha"):
            check(name, getattr(self, name) > 0, "a positive number")
        check("clip_low", 0 < self.clip_low < 1, "between 0 and 1")
        check("dual_clip", self.dual_clip == 0 or self.dual_clip > 1, "0, or above 1")
        check("tis_cap", self.tis_cap >= 1, "at least 1")
        for name in ("constant_tokens", "minibatches", "epochs", "max_skipped", "head_tokens"):
            check(name, getattr(self, name) >= 1, "at least 1")
        for name in (
            "designer_weight",
            "balance_loss",
            "router_z_loss",
            "kl_coef",
            "entropy_coef",
            "weight_decay",
            "warmup_steps",
            "lora_rank",
        ):
            check(name, getattr(self, name) >= 0, "0 or more")
        self._check_together()

    def _check_together(self) -> None:
        """Refuse what would silently not be what its name says."""
        if self.schedule != "constant" and self.decay_steps <= self.warmup_steps:
            raise ConfigError(
                f"learner.schedule={self.schedule!r} reaches zero after learner.decay_steps="
                f"{self.decay_steps}, which must exceed learner.warmup_steps={self.warmup_steps}; "
                "set learner.decay_steps to the optimiser steps of the run"
            )
        if self.schedule == "constant" and self.decay_steps:
            raise ConfigError(
                f"learner.decay_steps={self.decay_steps} is for a learning rate that decays, and "
                "learner.schedule is 'constant'; set it to 'linear' or 'cosine', or leave "
                "learner.decay_steps at 0"
            )
        if self.loss == "dr_grpo" and self.reduction != "constant":
            raise ConfigError(
                f"learner.loss='dr_grpo' divides by a constant, and learner.reduction="
                f"{self.reduction!r} does not; set learner.reduction to 'constant'"
            )
        if self.dual_clip and self.loss not in ("grpo", "dr_grpo"):
            raise ConfigError(
                f"learner.dual_clip={self.dual_clip} is for the losses grpo and dr_grpo, and "
                f"learner.loss={self.loss!r}; set learner.dual_clip to 0"
            )

    @property
    def rollout_steps(self) -> int:
        """Optimiser steps of one rollout, if it has as many trajectories as minibatches."""
        return self.minibatches * self.epochs


NORMS = {"dr_grpo": "mean", "rloo": "rloo"}
"""Losses that are what they are named for by one normalisation of the advantages alone."""


def check_learner(
    learner: LearnerConfig,
    agent_norm: str,
    designer_norm: str,
    num_experts: int,
    param_dtype: str,
) -> None:
    """Refuse a learner that the sections `reward`, `model` and `execution` do not suit."""
    check_precision(learner, param_dtype)
    norm = NORMS.get(learner.loss)
    for name, found in (("agent_norm", agent_norm), ("designer_norm", designer_norm)):
        if norm is not None and found != norm:
            raise ConfigError(
                f"learner.loss={learner.loss!r} needs advantages by reward.{name}={norm!r}, and it "
                f"is {found!r}; set it so, or choose another loss"
            )
    if learner.router_replay and num_experts == 1:
        raise ConfigError(
            "learner.router_replay replays a router's choices, and model.num_experts=1 has no "
            "router; leave it off"
        )


def check_precision(learner: LearnerConfig, param_dtype: str) -> None:
    """Refuse to train weights that are too coarse for an update to move them.

    AdamW moves a weight by about the learning rate. Numbers of bfloat16 near w are at least
    |w| / 256 apart, and what is below half of that is rounded away.
    """
    if param_dtype == "bfloat16" and not learner.lora_rank:
        raise ConfigError(
            "execution.param_dtype='bfloat16' rounds an update of about "
            f"learner.lr={learner.lr} away on every weight above {512 * learner.lr:.1g}; leave it "
            "at 'float32' (products are in execution.compute_dtype all the same), or set "
            "learner.lora_rank to train adapters, which are float32, on such weights"
        )
