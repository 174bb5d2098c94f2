"""Packing: trajectories of mixed length become device-shaped arrays with each token's loss share.

Nothing is truncated or duplicated, and only trajectories that have no loss token are left out.
Which groups are trained, and their advantages, are the caller's; how rows are filled and dealt to
devices is in `packing`.

One packed row of two trajectories, the second sampled twice; `_` is padding:

    tokens        a0 a1 a2 a3 b0 b1 b2 b3 b4 b5  _  _
    segment_ids    1  1  1  1  2  2  2  2  2  2  0  0
    positions      0  1  2  3  0  1  2  3  4  5  0  0
    loss_mask      0  0  1  1  0  1  1  0  1  1  0  0

Alignment: every array is indexed by the token it speaks of. Token t is predicted from the hidden
state at t - 1 of its own segment (a2 from a1, b1 from b0), so a trajectory's first token is never
predicted and never has a loss, whatever its mask says. `learner.objective` shifts these arrays one
to the left to meet the hidden states.

Loss: L = sum over roles of the role's mean token loss times its weight, by the mean that
`learner.reduction` names. `weights` holds each token's share of it, so that a plain weighted sum,
over any split into microbatches, is exactly L.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int, Integer

from spade_jax.config import BatchConfig, LearnerConfig
from spade_jax.errors import ConfigError, SpadeError
from spade_jax.learner.losses.masks import overlong
from spade_jax.learner.losses.reduction import shares
from spade_jax.learner.packing import aligned, arrange, pack
from spade_jax.types import Group, Role, Trajectory

ROLES = (Role.AGENT, Role.DESIGNER)
"""`Rows.roles` holds indices into this tuple."""

Array = Any  # NumPy when packed, JAX inside the step


class Rows(NamedTuple):
    """Packed tokens."""

    tokens: Int[Array, "rows seq"]  # int32
    positions: Int[Array, "rows seq"]  # int32, from 0 in every segment
    segment_ids: Int[Array, "rows seq"]  # int32, from 1 in every row; 0 is padding
    loss_mask: Bool[Array, "rows seq"]  # has a loss
    sampler_logprobs: Float[Array, "rows seq"]  # float32, 0 where there is no loss
    # the same before top-k, top-p and min-p, which the learner's are compared with
    untruncated_logprobs: Float[Array, "rows seq"]
    advantages: Float[Array, "rows seq"]  # float32, the trajectory's on each of its tokens
    weights: Float[Array, "rows seq"]  # float32, share of the loss; 0 where there is none
    temperatures: Float[Array, "rows seq"]  # float32, the trajectory's; 1 in padding
    roles: Int[Array, "rows seq"]  # int8 index into ROLES, 0 in padding
    fresh: Bool[Array, "rows seq"]  # sampled by the very weights about to be updated
    # by the learner before the first of several updates; None: what the update itself computes
    old_logprobs: Float[Array, "rows seq"] | None = None
    reference_logprobs: Float[Array, "rows seq"] | None = None  # by the frozen weights
    # the experts that the sampler chose, to replay
    routing: Integer[Array, "rows seq layers chosen"] | None = None


@dataclass(frozen=True)
class Batch:
    """The rows of one optimiser step, cut into microbatches."""

    rows: Rows
    sizes: tuple[int, ...]  # rows of each microbatch

    @property
    def num_microbatches(self) -> int:
        return len(self.sizes)

    def microbatches(self) -> Iterator[Rows]:
        """The rows of each forward and backward pass."""
        start = 0
        for size in self.sizes:
            yield Rows(*(None if a is None else a[start : start + size] for a in self.rows))
            start += size

    @property
    def efficiency(self) -> float:
        """Share of the computed tokens that are not padding."""
        return np.count_nonzero(self.rows.segment_ids) / self.rows.segment_ids.size


class Entry(NamedTuple):
    """One trajectory to train on."""

    role: Role
    group: str
    trajectory: Trajectory
    advantage: float
    loss_mask: Bool[np.ndarray, " seq"]  # of the tokens that can be predicted


def make_entries(groups: Sequence[Group], learner: LearnerConfig) -> list[Entry]:
    """The trajectories of the groups that have a token to learn from."""
    entries = []
    for group in groups:
        for trajectory, advantage in zip(group.trajectories, group.advantages, strict=True):
            if len(trajectory.tokens) == 0:
                raise ValueError(
                    f"a {group.role} trajectory has no tokens; leave it out of its group"
                )
            if not np.isfinite(advantage):
                raise ValueError(
                    f"advantage={advantage} of a {group.role} trajectory must be finite"
                )
            loss_mask = overlong(learner.overlong, trajectory).copy()
            loss_mask[0] = False  # nothing precedes the first token
            if loss_mask.any():
                entries.append(
                    Entry(group.role, group.key, trajectory, float(advantage), loss_mask)
                )
    return entries


def make_batch(
    entries: Sequence[Entry],
    config: BatchConfig,
    role_weights: Mapping[Role, float],
    *,
    policy_version: int,
    learner: LearnerConfig,
    shards: int = 1,
) -> Batch:
    """Pack these trajectories, each once and whole.

    Args:
        role_weights: weight of each role's mean token loss; every role needs one.
        policy_version: version of the weights about to be updated; what they sampled is `fresh`.
        learner: how losses are averaged and masked.
        shards: devices that split the rows (`Learner.shards`).
    """
    if not entries:
        raise SpadeError(
            "no trajectory of this step has a token to learn from: nothing to train on"
        )
    _check(entries, config, role_weights, learner)
    lengths = [len(entry.trajectory.tokens) for entry in entries]
    rows = pack(lengths, config.row_tokens, config.align_tokens)
    places, sizes = arrange(rows, lengths, shards, config.device_rows)
    shape = (sum(sizes), config.row_tokens)
    routing = entries[0].trajectory.routing if learner.router_replay else None
    flat = empty(shape, None if routing is None else routing.shape[1:])
    weights = _weights(entries, role_weights, learner)
    for row_index, row in enumerate(places):
        start = 0
        for segment_id, entry_index in enumerate(row, start=1):
            entry = entries[entry_index]
            at = (row_index, slice(start, start + lengths[entry_index]))
            _write(flat, at, segment_id, entry, learner)
            flat.weights[at] = np.where(entry.loss_mask, np.float32(weights[entry_index]), 0)
            flat.fresh[at] = entry.trajectory.policy_version == policy_version
            start += aligned(lengths[entry_index], config.align_tokens)
    return Batch(flat, sizes)


def _weights(
    entries: Sequence[Entry], role_weights: Mapping[Role, float], learner: LearnerConfig
) -> list[float]:
    """The share of each loss token of each entry."""
    weights = [0.0] * len(entries)
    for role in ROLES:
        indices = [index for index, entry in enumerate(entries) if entry.role is role]
        found = shares(
            learner.reduction,
            [int(entries[index].loss_mask.sum()) for index in indices],
            [entries[index].group for index in indices],
            role_weights.get(role, 0.0),
            learner.constant_tokens,
        )
        for index, share in zip(indices, found, strict=True):
            weights[index] = share
    return weights


def _check(
    entries: Sequence[Entry],
    config: BatchConfig,
    role_weights: Mapping[Role, float],
    learner: LearnerConfig,
) -> None:
    for role, _, trajectory, _, _ in entries:
        length = len(trajectory.tokens)
        if role not in role_weights:
            raise ConfigError(
                f"role_weights={dict(role_weights)} has no weight for {role}; give every role one"
            )
        if length > config.row_tokens:
            raise ConfigError(
                f"batch.row_tokens={config.row_tokens} is shorter than a {role} trajectory of "
                f"{length} tokens; set batch.row_tokens to at least {length}"
            )
        if learner.router_replay and trajectory.routing is None:
            raise ConfigError(
                f"learner.router_replay is on, but a {role} trajectory carries no routing; let the "
                "engine record it, or set learner.router_replay to False"
            )


def empty(shape: tuple[int, int], routing: tuple[int, ...] | None) -> Rows:
    """Rows of padding."""
    experts = None
    if routing is not None:
        experts = np.broadcast_to(np.arange(routing[-1], dtype=np.int16), (*shape, *routing)).copy()
    return Rows(
        tokens=np.zeros(shape, np.int32),
        positions=np.zeros(shape, np.int32),
        segment_ids=np.zeros(shape, np.int32),
        loss_mask=np.zeros(shape, np.bool_),
        sampler_logprobs=np.zeros(shape, np.float32),
        untruncated_logprobs=np.zeros(shape, np.float32),
        advantages=np.zeros(shape, np.float32),
        weights=np.zeros(shape, np.float32),
        temperatures=np.ones(shape, np.float32),
        roles=np.zeros(shape, np.int8),
        fresh=np.zeros(shape, np.bool_),
        routing=experts,
    )


def _write(
    flat: Rows, at: tuple[int, slice], segment_id: int, entry: Entry, learner: LearnerConfig
) -> None:
    """Write one trajectory into its place, in the host arrays that `empty` made."""
    trajectory, loss_mask = entry.trajectory, entry.loss_mask
    flat.tokens[at] = trajectory.tokens
    flat.positions[at] = np.arange(len(loss_mask))
    flat.segment_ids[at] = segment_id
    flat.loss_mask[at] = loss_mask
    # Outside the mask the log-probabilities mean nothing and may be anything, NaN included.
    sampled = np.where(loss_mask, trajectory.sampler_logprobs, np.float32(0))
    untruncated = np.where(loss_mask, trajectory.untruncated_logprobs, np.float32(0))
    flat.sampler_logprobs[at] = sampled if learner.tis_logprobs == "sampled" else untruncated
    flat.untruncated_logprobs[at] = untruncated
    flat.advantages[at] = entry.advantage
    flat.temperatures[at] = trajectory.temperature
    flat.roles[at] = ROLES.index(entry.role)
    if flat.routing is not None and trajectory.routing is not None:
        # The last sampled token was never run, so that its experts, below 0, are not known; they
        # have no part in any loss, and keep the place holders of padding.
        known = trajectory.routing >= 0
        flat.routing[at] = np.where(known, trajectory.routing, flat.routing[at])
