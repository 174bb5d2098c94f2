"""What a pool did between two looks at it. How it becomes metrics is in `measures`."""

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
    programs: int  # different programs of which an instance was opened
    instances: int  # opened and reset
    steps: int  # answered, replays left out
    step_s: Sequence[float]  # processor seconds of each of these
    spawn_s: Sequence[float]  # wall seconds from wanting a worker to the loaded program
    busy_s: float  # time in which a request was waiting
    peak_bytes: int  # most memory that all workers together had added
    workers: int  # alive now, spare ones left out
    quarantined: int  # programs in quarantine now
