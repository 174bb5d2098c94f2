"""What a pool did between two looks at it. How it becomes metrics is in `measures`."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from spade_jax.types import Outcome


@dataclass(frozen=True)
class PoolStats:
    """What happened since the last look, and how things stand."""

    requests: int  # sent to workers, replays included
    spawned: int  # workers started
    rebuilt: int  # instances moved to another worker
    retries: int  # requests made again because their worker went down blamelessly
    faults: dict[Outcome, int]  # instances that ended in a fault
    refused: int  # instances that were not opened, their program being in quarantine
    programs: frozenset[str]  # of which an instance was opened, by their digests
    instances: int  # opened and reset
    steps: int  # answered, replays left out
    step_s: Sequence[float]  # processor seconds of each of these
    spawn_s: Sequence[float]  # wall seconds from wanting a worker to the loaded program
    busy_s: float  # time in which a request was waiting
    peak_bytes: int  # most memory that all workers together had added
    workers: int  # alive now, spare ones left out
    quarantined: int  # programs in quarantine now


def joined(pools: Sequence[PoolStats]) -> PoolStats:
    """What the pools of several hosts did together; the most memory is that of one host."""
    together = {
        name: sum(getattr(pool, name) for pool in pools)
        for name in ("requests", "spawned", "rebuilt", "retries", "refused", "instances", "steps")
    }
    return PoolStats(
        **together,
        faults=dict(sum((Counter(pool.faults) for pool in pools), Counter())),
        programs=frozenset().union(*(pool.programs for pool in pools)),
        step_s=[seconds for pool in pools for seconds in pool.step_s],
        spawn_s=[seconds for pool in pools for seconds in pool.spawn_s],
        busy_s=sum(pool.busy_s for pool in pools) / len(pools),
        peak_bytes=max(pool.peak_bytes for pool in pools),
        workers=sum(pool.workers for pool in pools),
        quarantined=max(pool.quarantined for pool in pools),
    )
