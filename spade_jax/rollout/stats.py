"""What the sampler did, counted while it works."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from spade_jax.rollout.pages import PageTable


@dataclass
class EngineStats:
    """What the engine did since it was last asked."""

    sampled_tokens: int = 0
    prefilled_tokens: int = 0  # run through the model to fill the cache
    prefix_hit_tokens: int = 0  # found in the cache instead
    rounds: int = 0
    decode_steps: int = 0
    occupied_slot_steps: int = 0  # of decode_steps x slots, those that sampled a token
    preempted_count: int = 0  # times that a sequence gave its pages back before its end
    failed_count: int = 0  # requests whose scores were no numbers
    held_places: int = 0  # places for tokens in the pages in use, summed at each plan and result
    filled_places: int = 0  # of these, those that hold a token
    held_pages_max: int = 0
    gather_s: float = 0.0  # inside `gather`
    device_s: float = 0.0  # from first dispatch to results on the host, late compiles included
    prefill_s: float = 0.0  # of it, until the prompts were done
    decode_s: float = 0.0  # of it, from there on
    host_s: float = 0.0  # planning rounds, filling arrays for them and taking in their results
    load_s: float = 0.0  # moving weights to the sampler
    late_compiles: int = 0  # programs that `compile` had not compiled when needed: should stay 0

    def __add__(self, other: "EngineStats") -> "EngineStats":
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        most = max(self.held_pages_max, other.held_pages_max)
        return EngineStats(**(sums | {"held_pages_max": most}))

    def take(self) -> "EngineStats":
        """Return what was counted and begin anew."""
        taken = replace(self)
        for field in fields(self):
            setattr(self, field.name, field.default)
        return taken

    def count_pages(self, table: PageTable) -> None:
        """Look at how well the pages in use are used."""
        self.held_places += table.num_held * table.page_tokens
        self.filled_places += table.num_filled
        self.held_pages_max = max(self.held_pages_max, table.num_held)


def joined(samplers: Sequence[EngineStats]) -> EngineStats:
    """What several samplers did at the same time: counts add up, seconds are the mean, those of
    planning rounds excepted, which belong to the rounds of all.
    """
    together = EngineStats()
    for each in samplers:
        together += each
    seconds = [f.name for f in fields(EngineStats) if f.name.endswith("_s") and f.name != "host_s"]
    means = {name: getattr(together, name) / len(samplers) for name in seconds}
    return replace(together, **means)
