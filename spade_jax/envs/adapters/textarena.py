"""TextArena's games for one player.

Options: keyword arguments of the game. An action without brackets gets them, as the package's own
wrapper does it; an observation is what is new since the last one, without an echo of the action. A
game that says it is done has terminated, with the reward it gives; before that the reward is 0.
"""

import contextlib
import functools
import importlib
from pathlib import Path
from typing import Any

from spade_jax.envs.adapters import words
from spade_jax.envs.adapters.base import PublicEnv

_RAW = "-raw"  # how the package names a game without the wrappers that repeat the whole history


def prepare() -> None:
    """Import the package with the modules of its games."""
    words.install()
    for game in _games().values():
        with contextlib.suppress(Exception):  # told to whoever plays that game
            importlib.import_module(_module(game))


def listing() -> list[list[str]]:
    """Identifier, family and why it is unseeded, of every game for one player."""
    return [
        [name, f"game/{_class(game).lower()}", ""]
        for name, game in _games().items()
        if "SinglePlayerState(" in _source(game)
    ]


class Adapter(PublicEnv):
    """One game."""

    def begin(self, seed: int) -> str:
        self._game = _package().make(self.identifier + _RAW, **self.options)
        self._game.reset(num_players=1, seed=seed)
        return self._news()

    def act(self, action: str) -> tuple[str, float, bool, bool]:
        if "[" not in action:
            action = f"[{action}]"
        done, _ = self._game.step(action)
        if not done:
            return self._news() or "Nothing new.", 0.0, False, False
        rewards, notes = self._game.close()
        reason = notes[0].get("reason") or "The game is over."
        return f"{self._news()}\n{reason}".strip(), rewards[0], True, False

    def _news(self) -> str:
        _, messages = self._game.get_observation()
        return "\n".join(
            str(kind if isinstance(kind, str) else text).strip()  # some games mix the two up
            for sender, text, kind in messages
            if "PLAYER_ACTION" not in (getattr(kind, "name", ""), getattr(sender, "name", ""))
        ).strip()


@functools.cache
def _package() -> Any:
    package: Any = importlib.import_module("textarena")
    refuse = package.SinglePlayerState.set_invalid_move

    @functools.wraps(refuse)
    def set_invalid_move(state: Any, reason: Any, reward: Any = -1.0) -> Any:
        if isinstance(reward, str):  # three games give them in the other order
            reason, reward = reward, reason
        return refuse(state, reason=reason, reward=reward)

    package.SinglePlayerState.set_invalid_move = set_invalid_move
    return package


@functools.cache
def _games() -> dict[str, str]:
    """Entry point of every game, variants of another size included."""
    _package()
    registry = importlib.import_module("textarena.envs.registration").ENV_REGISTRY
    return {
        name.removesuffix(_RAW): spec.entry_point
        for name, spec in sorted(registry.items())
        if name.endswith(_RAW)
    }


def _module(entry_point: str) -> str:
    return entry_point.partition(":")[0]


def _class(entry_point: str) -> str:
    return entry_point.partition(":")[2].removesuffix("Env")


@functools.cache
def _source(entry_point: str) -> str:
    """The module's text, which is there even if this Python cannot compile it."""
    relative = Path(*_module(entry_point).split(".")[1:]).with_suffix(".py")
    paths = [Path(folder) / relative for folder in _package().__path__]
    return "".join(path.read_text() for path in paths if path.exists())
