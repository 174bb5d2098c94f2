"""The section `envs` of the configuration: what generated programs may use, and how hard it is to
be admitted."""

from dataclasses import dataclass

from spade_jax.settings import Section, require


@dataclass(frozen=True)
class EnvsConfig(Section):
    """Limits on generated programs and the strength of their admission."""

    load_s: float = 2.0  # deadline for loading a program
    reset_s: float = 2.0  # deadline for reset and for solution
    step_s: float = 1.0  # deadline for one step
    episode_s: float = 20.0  # processor time of one episode
    trial_s: float = 60.0  # processor time of all plays of one admission, and of a hint's
    memory_bytes: int = 256 * 2**20  # address space a worker may add to its zygote's
    pool_memory_bytes: int = 2**31  # memory all workers together may add; the largest is ended
    max_workers: int = 16  # worker processes alive at once
    spare_workers: int = 2  # confined workers that each of the two zygotes keeps ready
    instances_per_worker: int = 32  # episodes one worker holds
    # "I-accept" runs programs on a host that cannot contain them, and marks all results
    unsafe_sandbox: str = ""
    # seeds on which plays are compared between two processes, and the solution must win
    admit_seeds: int = 5
    # more seeds on which the solution must win, and thoughtless play is tried
    probe_seeds: int = 20
    # share of seeds that doing nothing, constant or random play, or copying the hint may win
    max_probe_win_frac: float = 0.1
    # similarity (names, comments and numbers aside) from which a program is refused as one that was
    # there before; 1 refuses copies alone, and other words in one pattern reach 0.94
    duplicate_similarity: float = 0.95

    def __post_init__(self) -> None:
        for name in ("load_s", "reset_s", "step_s", "episode_s", "trial_s"):
            require(
                getattr(self, name) > 0,
                f"envs.{name}",
                getattr(self, name),
                "a positive number of seconds",
            )
        for name in ("memory_bytes", "pool_memory_bytes"):
            require(
                getattr(self, name) >= 2**24,
                f"envs.{name}",
                getattr(self, name),
                "at least 16777216",
            )
        require(0 <= self.spare_workers <= 64, "envs.spare_workers", self.spare_workers, "0 to 64")
        require(
            self.unsafe_sandbox in ("", "I-accept"),
            "envs.unsafe_sandbox",
            self.unsafe_sandbox,
            'nothing, or "I-accept" to run programs where they are not contained',
        )
        for name in ("max_workers", "instances_per_worker", "probe_seeds"):
            require(getattr(self, name) >= 1, f"envs.{name}", getattr(self, name), "at least 1")
        require(
            self.admit_seeds >= 2,
            "envs.admit_seeds",
            self.admit_seeds,
            "at least 2: instances must differ",
        )
        require(
            0 <= self.max_probe_win_frac <= 1,
            "envs.max_probe_win_frac",
            self.max_probe_win_frac,
            "0 to 1",
        )
        require(
            0 < self.duplicate_similarity <= 1,
            "envs.duplicate_similarity",
            self.duplicate_similarity,
            "above 0, at most 1",
        )
