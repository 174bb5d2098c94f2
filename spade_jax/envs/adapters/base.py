"""What every adapter of a package builds on: randomness of its own, and environments of one answer.

Standard library only; it runs in workers, zygotes and the process that lists a package.
"""

import contextlib
import importlib
import json
import random
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any, ClassVar


def load(package: str) -> ModuleType:
    """Import a package's adapter and let it import the package."""
    adapter = importlib.import_module(f"spade_jax.envs.adapters.{package}")
    with contextlib.suppress(ImportError):
        importlib.import_module("numpy.random")  # else imported by the first instance
    adapter.prepare()
    return adapter


class PublicEnv:
    """An environment whose package draws from generators that the whole process shares.

    Each instance puts its own state of them in place while it works: otherwise the instances of one
    worker would change one another's play. Subclasses give `begin` and `act`.
    """

    identifier = ""
    options: ClassVar[dict[str, Any]] = {}

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        random.seed(seed)
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed(seed % 2**32)
        self._states = _states()
        with self._own_randomness():
            return self.begin(seed), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        with self._own_randomness():
            observation, reward, terminated, truncated = self.act(action)
        return observation, _cut(float(reward)), terminated, truncated, {}

    def begin(self, seed: int) -> str:
        """Make the instance of a seed; returns the first observation."""
        raise NotImplementedError

    def act(self, action: str) -> tuple[str, float, bool, bool]:
        """Observation, reward, terminated, truncated."""
        raise NotImplementedError

    @contextlib.contextmanager
    def _own_randomness(self) -> Iterator[None]:
        random.setstate(self._states[0])
        if numpy := sys.modules.get("numpy"):
            numpy.random.set_state(self._states[1])
        try:
            yield
        finally:
            self._states = _states()


class AnswerEnv(PublicEnv):
    """One question; the package scores the answer, up to 1 for a right one.

    A wrong answer ends the episode with its score, or at the last of `options["attempts"]`. What
    the scorer raises is the program's error. Subclasses give `begin`, `score` and `reference`.
    """

    def __init__(self) -> None:
        self.settings = dict(self.options)
        self._attempts = int(self.settings.pop("attempts", 1))

    def act(self, action: str) -> tuple[str, float, bool, bool]:
        score = float(self.score(action))
        self._attempts -= 1
        if score >= 1 - 1e-6:
            return "Correct.", 1.0, True, False
        if self._attempts > 0:
            return f"Not correct. Attempts left: {self._attempts}.", score, False, False
        return "Not correct.", score, True, False

    def score(self, answer: str) -> float:
        """What the package gives for an answer."""
        raise NotImplementedError

    def reference(self) -> str:
        """The package's own answer.

        Raises:
            LookupError: it has none.
        """
        raise NotImplementedError

    def solution(self) -> list[str]:
        return [self.reference()]


def _cut(reward: float) -> float:
    """The reward in [-1, 1]; NaN stays what it is, for the pool to refuse."""
    return reward if reward != reward else max(-1.0, min(1.0, reward))


def _states() -> tuple[Any, Any]:
    numpy = sys.modules.get("numpy")
    return random.getstate(), numpy.random.get_state() if numpy else None


def main() -> None:
    """Print the environments of a package as one line of JSON."""
    package, package_path = sys.argv[1:]
    sys.path[:0] = json.loads(package_path)
    listing = load(package).listing()
    print("\n" + json.dumps(listing))
