"""What an update says of itself, from the sums over its microbatches."""

import math
from collections.abc import Sequence

import numpy as np

from spade_jax.learner.batch import ROLES, Batch
from spade_jax.learner.objective import Objective, Sums


def report(sums: Sums, batch: Batch, objective: Objective) -> dict[str, float]:
    """Name what was measured; a role without tokens or a gap without fresh tokens has no entry."""
    live = batch.rows.segment_ids > 0
    metrics = {
        "batch/rows_count": float(live.any(-1).sum()),
        "batch/tokens_count": float(live.sum()),
        "batch/packed_frac": batch.efficiency,
        **_routing(sums, int(live.sum())),
    }
    for index, role in enumerate(ROLES):
        if (count := int(sums.loss_tokens[index])) == 0:
            continue
        metrics[f"loss/{role}"] = float(sums.loss[index]) / count
        metrics[f"optim/{role}_grad_norm"] = math.sqrt(float(sums.hidden_grad_square[index]))
        if objective == "policy":
            metrics[f"policy/entropy_{role}_mean"] = float(sums.entropy[index]) / count
            if batch.rows.reference_logprobs is not None:
                metrics[f"policy/kl_{role}_mean"] = float(sums.kl[index]) / count
    if objective == "policy":
        loss_tokens = int(sums.loss_tokens.sum())
        metrics["loss/clip_frac"] = float(sums.clipped) / loss_tokens
        metrics["loss/tis_clip_frac"] = float(sums.tis_capped) / loss_tokens
    if fresh := int(sums.fresh_tokens):
        metrics["sampler/learner_logprob_gap_max"] = float(sums.gap_max)
        metrics["sampler/learner_logprob_gap_mean"] = float(sums.gap_sum) / fresh
    return metrics


def _routing(sums: Sums, tokens: int) -> dict[str, float]:
    """How routers spread the tokens over experts; `Sums.expert_load` has it expert by expert."""
    load = sums.expert_load / sums.expert_load.sum(-1, keepdims=True)
    metrics = {"moe/expert_load_max_frac": float(load.max())}
    if (experts := load.shape[-1]) == 1:
        return metrics
    imbalance = load.max(-1) * experts
    evenness = -(load * np.log(np.maximum(load, 1e-30))).sum(-1) / math.log(experts)
    return metrics | {
        "moe/load_imbalance_max": float(imbalance.max()),
        "moe/load_imbalance_mean": float(imbalance.mean()),
        "moe/load_evenness_min": float(evenness.min()),
        "moe/dropped_count": float(sums.dropped.sum()),
        "moe/balance_loss": float(sums.balance.mean()) / tokens,
        "moe/router_z_loss": float(sums.router_z.mean()) / tokens,
    }


def joined(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """One report of several steps: counts add up, maxima and minima stay such, the rest is the
    mean over the steps that have it.
    """
    names = dict.fromkeys(name for step in steps for name in step)
    found = {name: [step[name] for step in steps if name in step] for name in names}
    how = {"_count": math.fsum, "_max": max, "_min": min}

    def join(name: str, values: list[float]) -> float:
        for ending, function in how.items():
            if name.endswith(ending):
                return function(values)
        return math.fsum(values) / len(values)

    return {name: join(name, values) for name, values in found.items()}
