"""The state of self-play that outlives a step: environments in play, the designer groups that wait,
the trackers of the skills, the memory, how hard the last steps were, and the newest programs.

All of it goes into the checkpoint as JSON (design decision 7). Nothing here samples or plays.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from spade_jax.errors import CheckpointError
from spade_jax.rewards.learning_potential import Tracker
from spade_jax.roles.diversity import Window
from spade_jax.roles.memory import Memory
from spade_jax.types import (
    Arm,
    Design,
    Environment,
    EnvironmentSource,
    Episode,
    Trajectory,
    Verdict,
    to_json,
)

LEARNABLE_STEPS = 16
"""Steps that the learnable share is taken over (paper)."""


class ScoredPlay(NamedTuple):
    """An unhinted play that carries a return."""

    step: int
    seed: int
    episode_return: float
    win: bool


@dataclass
class PlayTally:
    """What the plays of one environment have shown so far.

    `returns[arm]` maps "seed/play" to a return of the regeneration step, None for a void play; both
    arms hold the same keys if both were played. `scored` holds the scored unhinted plays of every
    step since the environment was written.
    """

    returns: dict[str, dict[str, float | None]] = field(
        default_factory=lambda: {arm.value: {} for arm in Arm}
    )
    scored: list[ScoredPlay] = field(default_factory=list)
    # outcomes of the plays that the program itself ended, in either arm
    faults: list[str] = field(default_factory=list)

    @property
    def win_rate(self) -> float | None:
        """Binary wins over scored unhinted plays; None before the first."""
        return sum(play.win for play in self.scored) / len(self.scored) if self.scored else None

    def by_step(self) -> dict[int, list[float]]:
        """Unhinted returns by the step they were played in."""
        found: dict[int, list[float]] = {}
        for play in self.scored:
            found.setdefault(play.step, []).append(play.episode_return)
        return found

    def pairs(self, arm: Arm) -> dict[tuple[int, int], float | None]:
        """Returns of one arm by (seed, play index); JSON keys are text, hence the split."""
        split = ((play.split("/"), value) for play, value in self.returns[arm].items())
        return {(int(seed), int(index)): value for (seed, index), value in split}

    def add(self, episode: Episode, *, paired: bool) -> None:
        """Count one episode; `paired` when both arms were played in its step."""
        if paired:
            play = f"{episode.seed}/{episode.play_index}"
            self.returns[episode.arm][play] = episode.episode_return
        if episode.outcome.program_fault:
            self.faults.append(episode.outcome.value)
        if episode.arm is Arm.UNHINTED and episode.episode_return is not None:
            self.scored.append(
                ScoredPlay(episode.step, episode.seed, episode.episode_return, episode.win)
            )


@dataclass
class Pending:
    """The designs of one cycle, waiting to be trained on; tallies by environment id."""

    cycle: int
    step: int
    designs: list[Design]
    tallies: dict[str, PlayTally]


class Difficulties(NamedTuple):
    """How many environments of one step were of which difficulty, and how many were asked for."""

    learnable: int
    easy: int
    hard: int
    capacity: int


@dataclass
class Curriculum:
    """Everything self-play carries from step to step."""

    memory: Memory
    environments: list[Environment] = field(default_factory=list)
    pending: list[Pending] = field(default_factory=list)
    trackers: dict[str, Tracker] = field(default_factory=dict)  # by skill
    difficulties: list[Difficulties] = field(default_factory=list)  # of the last steps
    window: Window = field(default_factory=Window)

    def observe(self, episodes: Sequence[Episode], capacity: int) -> None:
        """Note how hard the environments of a step were by its unhinted plays; `capacity` is how
        many there could have been.
        """
        wins: dict[str, list[bool]] = {}
        for episode in episodes:
            if episode.arm is Arm.UNHINTED and not episode.outcome.void:
                wins.setdefault(episode.environment_id, []).append(episode.win)
        rates = [sum(found) / len(found) for found in wins.values()]
        step = Difficulties(*banded(rates), max(capacity, len(rates)))
        self.difficulties = [*self.difficulties, step][-LEARNABLE_STEPS:]

    def state(self) -> dict[str, Any]:
        """JSON-able copy."""
        return {
            "memory": self.memory.state(),
            "environments": to_json(self.environments),
            "pending": to_json(self.pending),
            "trackers": to_json(self.trackers),
            "difficulties": to_json(self.difficulties),
            "window": self.window.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take `state()` back.

        Raises:
            CheckpointError: the state was not written by this version.
        """
        try:
            self.memory.restore(state["memory"])
            self.environments = [_environment(item) for item in state["environments"]]
            self.pending = [
                Pending(
                    item["cycle"],
                    item["step"],
                    [_design(design) for design in item["designs"]],
                    {name: _tally(tally) for name, tally in item["tallies"].items()},
                )
                for item in state["pending"]
            ]
            self.trackers = {name: Tracker(**item) for name, item in state["trackers"].items()}
            self.difficulties = [Difficulties(*step) for step in state["difficulties"]]
            self.window = Window.restored(state["window"])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the checkpoint's curriculum cannot be read ({error!r}); it was written by "
                f"another version: "
                "start a new run.dir"
            ) from error


def _tally(item: Mapping[str, Any]) -> PlayTally:
    return PlayTally(**dict(item, scored=[ScoredPlay(*play) for play in item["scored"]]))


def _trajectory(item: Mapping[str, Any]) -> Trajectory:
    return Trajectory(
        tokens=np.asarray(item["tokens"], np.int32),
        loss_mask=np.asarray(item["loss_mask"], bool),
        sampler_logprobs=np.asarray(item["sampler_logprobs"], np.float32),
        untruncated_logprobs=np.asarray(item["untruncated_logprobs"], np.float32),
        turn_index=np.asarray(item["turn_index"], np.int16),
        policy_version=item["policy_version"],
        temperature=item["temperature"],
        routing=None if item["routing"] is None else np.asarray(item["routing"], np.uint16),
        truncated=item["truncated"],
        num_untrained=item.get("num_untrained", 0),  # older checkpoints do not say
    )


def _source(item: Mapping[str, Any] | None) -> EnvironmentSource | None:
    return None if item is None else EnvironmentSource(**item)


def _environment(item: Mapping[str, Any]) -> Environment:
    fields = dict(item, source=_source(item["source"]), verdict=Verdict(**item["verdict"]))
    return Environment(**fields)


def _design(item: Mapping[str, Any]) -> Design:
    return Design(
        **dict(
            item,
            trajectory=_trajectory(item["trajectory"]),
            verdict=Verdict(**item["verdict"]),
            source=_source(item["source"]),
        )
    )


def banded(win_rates: Sequence[float], low: float = 0.2, high: float = 0.8) -> tuple[int, int, int]:
    """How many win rates lie in [low, high], bounds included (paper), above, and below."""
    easy, hard = sum(rate > high for rate in win_rates), sum(rate < low for rate in win_rates)
    return len(win_rates) - easy - hard, easy, hard
