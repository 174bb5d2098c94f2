"""Programs that no designer of this run writes: those of a folder, and the problems of RLVE, which
follow the policy by one of two controllers.

    folder  a pool as the SPADE project releases them, or any folder of .py files
    rlve    the package's problems by name
            window              each with a window of difficulties (`raised`)
            learning_potential  all of one difficulty, half of them those whose mean return moves
                                most: by |fast - slow| of two moving averages (`Potentials`)

What no potential chooses is drawn in shuffled orders from the run's seed, each once before any is
drawn again, as in the paper's controls (specification of the reference: the fixed pool, and fixed
environments with its two controllers). Where an order stands goes into the checkpoint. Programs are
texts here; nothing of them is run.
"""

import logging
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from spade_jax.config import DesignerConfig
from spade_jax.envs import adapters
from spade_jax.envs.spade_pools import Entry, read_folder
from spade_jax.envs.spade_texts import is_adopted
from spade_jax.errors import CheckpointError, ConfigError, SpadeError
from spade_jax.rewards.learning_potential import Tracker, update
from spade_jax.rollout.keys import named_rng
from spade_jax.types import Arm, Environment, EnvironmentSource, Episode

logger = logging.getLogger(__name__)

MAX_DIFFICULTY = 20
"""Where a window of RLVE ends (the reference)."""
NO_SKILL = "Unnamed"
"""The skill of a program whose pool names none that a metric can be named after."""


@dataclass(frozen=True)
class Supplied:
    """A program with the hint that came with it; "" if none did."""

    source: EnvironmentSource
    hint: str = ""


class Order:
    """Names in shuffled orders that never end; each order has all of them."""

    def __init__(self, names: Iterable[str], seed: int) -> None:
        self._names, self._seed = sorted(names), seed
        self._rounds, self._left = 0, list[str]()

    def draw(self, count: int, without: Iterable[str] = ()) -> list[str]:
        """The next names, all different as long as there are so many; those of `without`, which
        are not all names, keep their places.
        """
        drawn, passed = list[str](), frozenset(without)
        while True:
            ready = [name for name in self._left if name not in passed][: count - len(drawn)]
            for name in ready:
                self._left.remove(name)
            drawn += ready
            if len(drawn) == count:
                return drawn
            self._left = named_rng(self._seed, "supply", self._rounds).sample(
                self._names, len(self._names)
            )
            self._rounds += 1
            # those that this draw has already come last: none is in a draw twice
            self._left.sort(key=drawn.__contains__)

    def state(self) -> dict[str, Any]:
        """JSON-able copy."""
        return {"rounds": self._rounds, "left": list(self._left)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take `state()` back.

        Raises:
            CheckpointError: a name in it is no more.
        """
        if gone := set(state["left"]) - set(self._names):
            raise CheckpointError(
                f"{len(gone)} programs that were still to be drawn are no longer there, such as "
                f"{min(gone)}; put back what the run was started with, or start a new run.dir"
            )
        self._rounds, self._left = int(state["rounds"]), list(state["left"])


class Folder:
    """The programs of a folder."""

    def __init__(self, entries: Sequence[Entry], seed: int) -> None:
        self._entries = {entry.source.environment_id: entry for entry in entries}
        self._order = Order(self._entries, seed)

    @classmethod
    def load(cls, config: DesignerConfig, seed: int) -> "Folder":
        """Read the folder of the settings.

        Raises:
            ConfigError: there is none, or it has fewer programs than a cycle asks for.
        """
        where = f"designer.folder={config.folder!r}"
        try:
            found = read_folder(Path(config.folder).expanduser())
        except (SpadeError, OSError) as error:
            raise ConfigError(
                f"{where} cannot be read: {error}; name a folder of .py files"
            ) from error
        why = [f"{problem.path}: {problem.reason}" for problem in found.problems]
        if len(found.entries) < config.designs:
            raise ConfigError(
                f"{where} has {len(found.entries)} programs that can be read, less than "
                f"designer.designs={config.designs} of a cycle"
                + (f" ({len(why)} problems, the last: {why[-1]})" if why else "")
                + "; name a folder of more programs, or lower designer.designs"
            )
        adopted = sum(is_adopted(entry.source.program) for entry in found.entries)
        if adopted and config.gates == "all":
            raise ConfigError(
                f"{where} has {adopted} programs by the contract of the reference, which have no "
                "proof that they can be won, and designer.gates='all' asks for it; set "
                "designer.gates to 'public' or 'none'"
            )
        if why:
            logger.warning("%s: %d remarks, the first: %s", where, len(why), why[0])
        logger.info("%s: %d programs", where, len(found.entries))
        return cls(found.entries, seed)

    def draw(self, cycle: int, count: int) -> list[Supplied]:
        """The next programs, whichever the cycle."""
        found = (self._entries[name] for name in self._order.draw(count))
        return [Supplied(_named(entry.source), entry.hint) for entry in found]

    def observe(self, environments: Sequence[Environment], episodes: Sequence[Episode]) -> None:
        """Nothing follows from plays here."""

    def state(self) -> dict[str, Any]:
        """JSON-able copy."""
        return self._order.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take `state()` back."""
        self._order.restore(state)


def _named(source: EnvironmentSource) -> EnvironmentSource:
    """The source with a skill that metrics can be named after."""
    first = source.skill[:1].lower()
    return source if first.isascii() and first.isalpha() else replace(source, skill=NO_SKILL)


@dataclass(frozen=True)
class Window:
    """Difficulties a problem is drawn at, both bounds included, and what plays at the upper one
    showed since it was last judged.
    """

    low: int = 0
    high: int = 0
    plays: int = 0
    wins: int = 0


def raised(
    window: Window, wins: Sequence[bool], *, win_frac: float, enough: int, width: int
) -> Window:
    """The window after plays at its upper bound.

        plays >= enough:  high + 1 (at most 20) if wins / plays >= win_frac,
                          low = max(low, high - width + 1), counts from 0 again
        else              counts go on

    Source: the reference's sliding window for RLVE (0.9, 128 and 4 in its recipes).
    """
    plays, won = window.plays + len(wins), window.wins + sum(wins)
    if plays < enough:
        return replace(window, plays=plays, wins=won)
    high = window.high
    if won / plays >= win_frac:
        high = min(high + 1, MAX_DIFFICULTY)
    return Window(max(window.low, high - width + 1), high)


class Potentials:
    """Which names teach most, by how much their mean returns move.

        fast <- (1 - fast_rate) fast + fast_rate r      likewise slow; the first r sets both
        potential = |fast - slow|,   r the mean return of the unhinted plays of a step

    Source: the reference's controller by learning potential (0.35 and 0.15), which takes the half
    with the greatest potentials and the rest by chance. It moves the averages once for each play;
    here once for each step, so that the order of plays does not count.
    """

    def __init__(self, fast_rate: float, slow_rate: float) -> None:
        self._rates = {"fast_rate": fast_rate, "slow_rate": slow_rate}
        self._trackers: dict[str, Tracker] = {}

    def observe(self, name: str, returns: Sequence[float]) -> None:
        """Take in the returns of one step's plays."""
        if returns:
            mean = math.fsum(returns) / len(returns)
            self._trackers[name] = update(self._trackers.get(name), mean, **self._rates)

    def greatest(self, count: int) -> list[str]:
        """At most so many names, greatest potential first; none of those that do not move."""
        found = {name: abs(each.fast - each.slow) for name, each in self._trackers.items()}
        moving = sorted((-potential, name) for name, potential in found.items() if potential > 0)
        return [name for _, name in moving[:count]]

    def state(self) -> dict[str, Any]:
        """JSON-able copy."""
        return {name: asdict(tracker) for name, tracker in sorted(self._trackers.items())}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take `state()` back."""
        self._trackers = {name: Tracker(**tracker) for name, tracker in state.items()}


class Problems:
    """The problems of RLVE."""

    def __init__(self, config: DesignerConfig, seed: int, names: Iterable[str]) -> None:
        self._config, self._seed = config, seed
        self._windows = {name: Window() for name in sorted(names)}
        self._potentials = Potentials(config.potential_fast, config.potential_slow)
        self._order = Order(self._windows, seed)

    @classmethod
    def load(
        cls,
        config: DesignerConfig,
        seed: int,
        catalogue: Callable[[str], Sequence[adapters.Listed]] = adapters.catalogue,
    ) -> "Problems":
        """Look the problems of the settings up in the package.

        Raises:
            ConfigError: it has no such problem, or there are fewer than a cycle asks for.
            SandboxError: it is not installed.
        """
        listed = [entry.id for entry in catalogue("rlve")]
        if unknown := sorted(set(config.problems) - set(listed)):
            raise ConfigError(
                f"designer.problems={unknown} are not in the package rlve; expected some of its "
                f"{len(listed)}, such as {', '.join(listed[:3])}"
            )
        names = config.problems or listed
        if len(names) < config.designs:
            raise ConfigError(
                f"designer.problems has {len(names)}, less than designer.designs={config.designs} "
                f"of a cycle; name more, or set designer.designs to {len(names)}"
            )
        return cls(config, seed, names)

    def draw(self, cycle: int, count: int) -> list[Supplied]:
        """The next problems: each at a difficulty of its window, or by their potentials."""
        chosen = list[str]()
        if self._config.controller == "learning_potential":
            chosen = self._potentials.greatest(count // 2)
        names = chosen + self._order.draw(count - len(chosen), without=chosen)
        return [
            self._supplied(name, named_rng(self._seed, "difficulty", cycle, name)) for name in names
        ]

    def _supplied(self, name: str, rng: random.Random) -> Supplied:
        window, difficulty = self._windows[name], self._config.problem_difficulty
        if self._config.controller == "window":
            difficulty = rng.randint(window.low, window.high)
        text = adapters.program("rlve", name, difficulty=difficulty)
        return Supplied(EnvironmentSource(text, name, str(difficulty), ""))

    def observe(self, environments: Sequence[Environment], episodes: Sequence[Episode]) -> None:
        """Move what the controller goes by: each window by the unhinted plays at its upper bound, a
        win being a binary one, or the potentials by the returns.
        """
        config = self._config
        for environment in environments:
            name = environment.source.skill
            window = self._windows[name]
            plays = [
                episode
                for episode in episodes
                if episode.environment_id == environment.environment_id
                and episode.arm is Arm.UNHINTED
                and not episode.outcome.void
            ]
            if config.controller == "learning_potential":
                returns = (episode.episode_return for episode in plays)
                self._potentials.observe(name, [each for each in returns if each is not None])
                continue
            if int(environment.source.difficulty) != window.high:
                continue
            self._windows[name] = raised(
                window,
                [episode.win for episode in plays],
                win_frac=config.window_win_frac,
                enough=config.window_plays,
                width=config.window_width,
            )

    def state(self) -> dict[str, Any]:
        """JSON-able copy."""
        windows = {name: asdict(window) for name, window in self._windows.items()}
        potentials = self._potentials.state()
        return {"order": self._order.state(), "windows": windows, "potentials": potentials}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take `state()` back."""
        self._order.restore(state["order"])
        found = {name: Window(**window) for name, window in state["windows"].items()}
        self._windows = {name: found[name] for name in self._windows}
        self._potentials.restore(state["potentials"])


Supply = Folder | Problems


def open_supply(config: DesignerConfig, seed: int) -> Supply | None:
    """What the settings take programs from; None where the designer writes them.

    Raises:
        ConfigError: it has not what a cycle asks for.
        SandboxError: the package it needs is not installed.
    """
    match config.source:
        case "folder":
            return Folder.load(config, seed)
        case "rlve":
            return Problems.load(config, seed)
        case "policy":
            return None
