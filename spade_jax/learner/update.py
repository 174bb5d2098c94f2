"""All updates of one rollout: its trajectories in parts, each of one optimiser step, as often as
the settings say.

The log-probabilities that do not move with the steps are computed once before the first: those of
the frozen reference, and, if there is more than one step, the old ones of the policy.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from models.transformer import Params
from spade_jax.config import BatchConfig
from spade_jax.learner.batch import Batch, make_batch, make_entries
from spade_jax.learner.packing import split
from spade_jax.learner.report import joined
from spade_jax.learner.step import Learner, TrainState
from spade_jax.types import Group, Role


def make_batches(
    learner: Learner,
    groups: Sequence[Group],
    config: BatchConfig,
    role_weights: Mapping[Role, float],
    *,
    policy_version: int,
) -> list[Batch]:
    """Pack the groups into the batches of one epoch, at most `learner.minibatches`; none when no
    trajectory has a token to learn from.

    A trajectory is in exactly one of them, and each has its share of both roles.
    """
    entries = make_entries(groups, learner.config)
    lengths = [len(entry.trajectory.tokens) for entry in entries]
    parts = split(lengths, [entry.role for entry in entries], learner.config.minibatches)
    return [
        make_batch(
            [entries[index] for index in part],
            config,
            role_weights,
            policy_version=policy_version,
            learner=learner.config,
            shards=learner.shards,
        )
        for part in parts
    ]


def update(
    learner: Learner,
    state: TrainState,
    batches: Sequence[Batch],
    reference: Params | None = None,
) -> tuple[TrainState, dict[str, float]]:
    """Take `learner.epochs` passes over the batches, one optimiser step each, consuming `state`.

    Args:
        reference: the frozen weights of the KL; None: those that adapters are added to.
    """
    config = learner.config
    if config.kl_coef:
        assert reference is not None or state.adapters is not None, "there is no reference"
        frozen = state.params if reference is None else reference
        batches = _with("reference_logprobs", learner.logprobs(frozen, batches), batches)
    if len(batches) * config.epochs > 1:
        olds = learner.logprobs(learner.policy(state), batches)
        batches = _with("old_logprobs", olds, batches)
    reports = []
    for _ in range(config.epochs):
        for batch in batches:
            state, metrics = learner.step(state, batch)
            reports.append(metrics)
    return state, joined(reports)


def _with(name: str, arrays: Sequence[np.ndarray], batches: Sequence[Batch]) -> list[Batch]:
    """The batches with an array each."""
    return [
        dataclasses.replace(batch, rows=batch.rows._replace(**{name: array}))
        for array, batch in zip(arrays, batches, strict=True)
    ]
