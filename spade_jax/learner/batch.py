"""Packing: trajectories of mixed length become device-shaped arrays with each token's loss share.

Nothing is truncated, dropped or duplicated. Which groups are trained, and their advantages, are
the caller's.

One packed row of two trajectories, the second sampled twice; `_` is padding:

    tokens        a0 a1 a2 a3 b0 b1 b2 b3 b4 b5  _  _
    segment_ids    1  1  1  1  2  2  2  2  2  2  0  0
    positions      0  1  2  3  0  1  2  3  4  5  0  0
    loss_mask      0  0  1  1  0  1  1  0  1  1  0  0

Alignment: every array is indexed by the token it speaks of. Token t is predicted from the hidden
state at t - 1 of its own segment (a2 from a1, b1 from b0), so a trajectory's first token is never
predicted and never has a loss, whatever its mask says. `learner.step` shifts these arrays one to
the left to meet the hidden states.

Loss: L = sum over roles of role_weight * (sum of the role's token losses / number of its tokens),
counting tokens that have a loss. `weights` holds role_weight / number for each of them, so that a
plain weighted sum, over any split into microbatches, is exactly L.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from spade_jax.config import BatchConfig
from spade_jax.errors import ConfigError, SpadeError
from spade_jax.types import Group, Role, Trajectory

ROLES = (Role.AGENT, Role.DESIGNER)
"""`Batch.roles` holds indices into this tuple."""

Array = Any  # NumPy when packed, JAX inside the step


class Batch(NamedTuple):
    """One optimiser step's tokens, [microbatches, rows, seq]; `microbatch` drops the first axis."""

    tokens: Int[Array, "*microbatches rows seq"]  # int32
    positions: Int[Array, "*microbatches rows seq"]  # int32, from 0 in every segment
    segment_ids: Int[Array, "*microbatches rows seq"]  # int32, from 1 in every row; 0 is padding
    loss_mask: Bool[Array, "*microbatches rows seq"]  # has a loss
    sampler_logprobs: Float[Array, "*microbatches rows seq"]  # float32, 0 where there is no loss
    advantages: Float[
        Array, "*microbatches rows seq"
    ]  # float32, the trajectory's on each of its tokens
    weights: Float[
        Array, "*microbatches rows seq"
    ]  # float32, share of the loss; 0 where there is none
    temperatures: Float[Array, "*microbatches rows seq"]  # float32, the trajectory's; 1 in padding
    roles: Int[Array, "*microbatches rows seq"]  # int8 index into ROLES, 0 in padding
    fresh: Bool[Array, "*microbatches rows seq"]  # sampled by the very weights about to be updated

    @property
    def num_microbatches(self) -> int:
        return self.tokens.shape[0]

    def microbatch(self, index: int) -> "Batch":
        """The rows of one forward and backward pass."""
        return Batch(*(array[index] for array in self))


def make_batch(
    groups: Sequence[Group],
    config: BatchConfig,
    role_weights: Mapping[Role, float],
    *,
    policy_version: int,
    row_multiple: int = 1,
) -> Batch:
    """Pack every trajectory of `groups` by first-fit decreasing; equal lengths keep their order.

    Args:
        role_weights: weight of each role's mean token loss; every role in `groups` needs one.
        policy_version: version of the weights about to be updated; what they sampled is `fresh`.
        row_multiple: rows per microbatch are rounded up to a multiple of this, with empty rows
            (`Learner.row_multiple`, the mesh's data shards).
    """
    entries = [
        (group.role, trajectory, float(advantage))
        for group in groups
        for trajectory, advantage in zip(group.trajectories, group.advantages, strict=True)
    ]
    _check(entries, config, role_weights)
    rows = pack([len(trajectory.tokens) for _, trajectory, _ in entries], config.row_tokens)
    microbatch_rows = -(-config.microbatch_rows // row_multiple) * row_multiple
    num_microbatches = -(-len(rows) // microbatch_rows)

    flat = _empty((num_microbatches * microbatch_rows, config.row_tokens))
    for row_index, row in enumerate(rows):
        start = 0
        for segment_id, entry_index in enumerate(row, start=1):
            role, trajectory, advantage = entries[entry_index]
            length = len(trajectory.tokens)
            at = (row_index, slice(start, start + length))
            _write(flat, at, segment_id, role, trajectory, advantage)
            flat.fresh[at] = trajectory.policy_version == policy_version
            start += length

    counts = np.array(
        [(flat.loss_mask & (flat.roles == index)).sum() for index in range(len(ROLES))]
    )
    if not counts.any():
        raise SpadeError(
            f"none of the {len(entries)} trajectories of this step has a sampled token: "
            "nothing to train on"
        )
    shares = [
        role_weights[role] / count if count else 0.0
        for role, count in zip(ROLES, counts.tolist(), strict=True)
    ]
    flat = flat._replace(
        weights=np.where(flat.loss_mask, np.array(shares, np.float32)[flat.roles], np.float32(0))
    )
    shape = (num_microbatches, microbatch_rows, config.row_tokens)
    return Batch(*(array.reshape(shape) for array in flat))


def _check(
    entries: Sequence[tuple[Role, Trajectory, float]],
    config: BatchConfig,
    role_weights: Mapping[Role, float],
) -> None:
    for role, trajectory, advantage in entries:
        length = len(trajectory.tokens)
        if role not in role_weights:
            raise ConfigError(
                f"role_weights={dict(role_weights)} has no weight for {role}; give every role one"
            )
        if length == 0:
            raise ValueError(f"a {role} trajectory has no tokens; leave it out of its group")
        if length > config.row_tokens:
            raise ConfigError(
                f"batch.row_tokens={config.row_tokens} is shorter than a {role} trajectory of "
                f"{length} tokens; set batch.row_tokens to at least {length}"
            )
        if not np.isfinite(advantage):
            raise ValueError(f"advantage={advantage} of a {role} trajectory must be finite")


def pack(lengths: Sequence[int], row_tokens: int) -> list[list[int]]:
    """Assign indices to rows, longest first, each to the first row with room; ties keep order."""
    rows: list[list[int]] = []
    free: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        length = lengths[index]
        row_index = next((row for row, space in enumerate(free) if space >= length), len(rows))
        if row_index == len(rows):
            rows.append([])
            free.append(row_tokens)
        rows[row_index].append(index)
        free[row_index] -= length
    return rows


def _empty(shape: tuple[int, int]) -> Batch:
    """Rows of padding."""
    return Batch(
        tokens=np.zeros(shape, np.int32),
        positions=np.zeros(shape, np.int32),
        segment_ids=np.zeros(shape, np.int32),
        loss_mask=np.zeros(shape, np.bool_),
        sampler_logprobs=np.zeros(shape, np.float32),
        advantages=np.zeros(shape, np.float32),
        weights=np.zeros(shape, np.float32),
        temperatures=np.ones(shape, np.float32),
        roles=np.zeros(shape, np.int8),
        fresh=np.zeros(shape, np.bool_),
    )


def _write(
    flat: Batch,
    at: tuple[int, slice],
    segment_id: int,
    role: Role,
    trajectory: Trajectory,
    advantage: float,
) -> None:
    """Write one trajectory into its place, in the host arrays that `_empty` made."""
    loss_mask = trajectory.loss_mask.copy()
    loss_mask[0] = False  # nothing precedes the first token
    flat.tokens[at] = trajectory.tokens
    flat.positions[at] = np.arange(len(loss_mask))
    flat.segment_ids[at] = segment_id
    flat.loss_mask[at] = loss_mask
    # Outside the mask the log-probabilities mean nothing and may be anything, NaN included.
    flat.sampler_logprobs[at] = np.where(loss_mask, trajectory.sampler_logprobs, np.float32(0))
    flat.advantages[at] = advantage
    flat.temperatures[at] = trajectory.temperature
    flat.roles[at] = ROLES.index(role)
