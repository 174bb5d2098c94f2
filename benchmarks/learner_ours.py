"""A contestant of the learner benchmark: ours, on packed rows.

    python benchmarks/learner_ours.py CHECKPOINT BATCHES.npz \
        [--row-tokens 2048] [--device-tokens 2048]

Started by `benchmarks/learner.py`; CHECKPOINT is a folder that `spade-jax convert` wrote. A step is
packing, forward, backward, AdamW, and bringing what is reported to the host.
"""

import argparse
from pathlib import Path

import jax
import learner_workload as workload
import numpy as np

from models import backends
from models.config import read_config
from models.execution import Execution
from models.sharding import build_mesh
from models.weights import load_weights
from spade_jax.config import BatchConfig, LearnerConfig
from spade_jax.learner.batch import Batch, make_batch, make_entries
from spade_jax.learner.step import Learner
from spade_jax.types import Group, Role, Trajectory

LEARNER = LearnerConfig(
    clip_low=workload.CLIPS[0],
    clip_high=workload.CLIPS[1],
    tis_cap=workload.TIS_CAP,
    lr=workload.LR,
    beta1=workload.BETAS[0],
    beta2=workload.BETAS[1],
    weight_decay=workload.WEIGHT_DECAY,
    max_grad_norm=workload.MAX_NORM,
)


def pack(sampled: list[workload.Sampled], row_tokens: int, device_tokens: int) -> Batch:
    """The trajectories as one batch, in microbatches of so many tokens."""
    trajectories = tuple(
        Trajectory(
            tokens=one.tokens,
            loss_mask=one.mask,
            sampler_logprobs=one.logprobs,
            untruncated_logprobs=one.logprobs,
            turn_index=np.zeros(len(one.tokens), np.int16),
            policy_version=0,
            temperature=1.0,
        )
        for one in sampled
    )
    advantages = np.array([one.advantage for one in sampled])
    group = Group(Role.AGENT, "all", trajectories, np.zeros(len(sampled), np.float32), advantages)
    return make_batch(
        make_entries([group], LEARNER),
        BatchConfig(row_tokens=row_tokens, device_tokens=device_tokens),
        {Role.AGENT: 1.0},
        policy_version=0,
        learner=LEARNER,
    )


def main() -> None:
    """Load, compile and serve."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("batches", type=Path)
    parser.add_argument("--row-tokens", type=int, default=2048)
    parser.add_argument("--device-tokens", type=int, default=2048)
    arguments = parser.parse_args()
    config = read_config(arguments.checkpoint)
    mesh = build_mesh(1, 1, 1, 1, jax.devices()[:1])
    execution = backends.resolve(Execution(), config)
    learner = Learner(config, LEARNER, mesh, execution)
    state = learner.init(load_weights(arguments.checkpoint, config, mesh, execution))

    def update(sampled: list[workload.Sampled]) -> float:
        nonlocal state
        state, metrics = learner.step(
            state, pack(sampled, arguments.row_tokens, arguments.device_tokens)
        )
        jax.block_until_ready(state)
        return metrics["loss/agent"]

    workload.serve(update, workload.load(arguments.batches))


if __name__ == "__main__":
    main()
