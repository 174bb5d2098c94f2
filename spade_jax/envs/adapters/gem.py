"""gem's games. Its wrapped Reasoning Gym is `reasoning_gym`, and its datasets need the network.

Options: keyword arguments of the game. An action without `\\boxed{}` gets it, which is what the
games read. Rewards, terminated and truncated are the game's own.
"""

import contextlib
import functools
import importlib
import logging
from typing import Any

from spade_jax.envs.adapters import words
from spade_jax.envs.adapters.base import PublicEnv

_GAME = "game:"


def prepare() -> None:
    """Import the package with the modules of its games."""
    words.install()
    logging.disable(logging.INFO)
    for spec in _games().values():
        with contextlib.suppress(Exception):  # told to whoever plays that game
            importlib.import_module(spec.entry_point.partition(":")[0])


def listing() -> list[list[str]]:
    """Identifier, family and why it is unseeded, of every game."""
    return [
        [name, f"game/{spec.entry_point.partition(':')[2].removesuffix('Env').lower()}", ""]
        for name, spec in _games().items()
    ]


class Adapter(PublicEnv):
    """One game."""

    def begin(self, seed: int) -> str:
        self._game = _registration().make(self.identifier, **self.options)
        return _with_suffix(*self._game.reset(seed))

    def act(self, action: str) -> tuple[str, float, bool, bool]:
        if "\\boxed" not in action:
            action = f"\\boxed{{{action}}}"
        observation, reward, terminated, truncated, notes = self._game.step(action)
        ended = terminated or truncated
        shown = observation if ended else _with_suffix(observation, notes)
        return shown, float(reward), bool(terminated), bool(truncated)


def _with_suffix(observation: str, notes: dict[str, Any]) -> str:
    return f"{observation}\n{notes.get('suffix', '')}".strip()


@functools.cache
def _registration() -> Any:
    importlib.import_module("gem.envs")
    return importlib.import_module("gem.envs.registration")


def _games() -> dict[str, Any]:
    registry = sorted(_registration().ENV_REGISTRY.items())
    return {name: spec for name, spec in registry if name.startswith(_GAME)}
