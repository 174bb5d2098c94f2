"""Reasoning Gym: one generated question, one answer, scored by the dataset it comes from.

Options: `attempts`, and the fields of the dataset's configuration. The seed of an episode is the
seed of the dataset, of which the first item is asked.
"""

import functools
import importlib
import json
from typing import Any

from spade_jax.envs.adapters.base import AnswerEnv

_ELSEWHERE = ("possible_answer", "example_answer", "example_correct_answer", "solution")
"""Where datasets that accept many answers keep one of them."""


def prepare() -> None:
    """Import the package."""
    _package()


def listing() -> list[list[str]]:
    """Identifier, family and why it is unseeded, of every dataset."""
    names = sorted(_package().factory.DATASETS)
    return [[name, f"reasoning_gym/{name}", ""] for name in names]


class Adapter(AnswerEnv):
    """One dataset."""

    def begin(self, seed: int) -> str:
        create = _package().create_dataset
        self._dataset = create(self.identifier, seed=seed, size=1, **self.settings)
        self._entry: dict[str, Any] = self._dataset[0]
        return self._entry["question"]

    def score(self, answer: str) -> float:
        return self._dataset.score_answer(answer, self._entry)

    def reference(self) -> str:
        if self._entry["answer"] is not None:
            return str(self._entry["answer"])
        metadata = self._entry["metadata"]
        for key in _ELSEWHERE:
            if (answer := metadata.get(key)) is not None:
                return answer if isinstance(answer, str) else json.dumps(answer)
        raise LookupError(f"{self.identifier} has no reference answer")


@functools.cache
def _package() -> Any:
    return importlib.import_module("reasoning_gym")
