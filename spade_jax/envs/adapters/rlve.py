"""RLVE (`rlve-gym`, imported as `Gym`): one generated problem, one answer, scored by its verifier.

Options: `attempts`, and `difficulty`, how often the problem's parameter controller is raised (0 by
default). The package imports torch for nothing but its seed; a stand-in takes its place, so torch
need not be installed. It runs generators in threads to time them; here they run in the worker's
only thread and the pool's own deadline ends them. Its verifier turns whatever a scorer raises into
the reward of a wrong answer; here the scorer itself is asked, and what it raises voids the episode.
"""

import functools
import importlib
import random
import sys
import types
from typing import Any

from spade_jax.envs.adapters.base import AnswerEnv

_MARKERS = ("<answer>", "</answer>")


def prepare() -> None:
    """Import the package with all its problems."""
    _package()


def listing() -> list[list[str]]:
    """Identifier, family and why it is unseeded, of every problem."""
    return [[name, f"rlve/{name}", ""] for name in sorted(_package()[0])]


class Adapter(AnswerEnv):
    """One problem."""

    def begin(self, seed: int) -> str:
        problems, controllers = _package()
        controller = controllers[self.identifier]()
        for _ in range(self.settings.get("difficulty", 0)):
            controller.update()
        parameter = random.choice(controller.get_parameter_list())
        self._problem = problems[self.identifier](answer_markers=_MARKERS)
        if not self._problem.generator(seed, parameter):
            raise RuntimeError(f"{self.identifier} could not generate an instance for seed {seed}")
        return self._problem.prompt_generator()

    def score(self, answer: str) -> float:
        return self._problem.scorer(f"{_MARKERS[0]}{answer}{_MARKERS[1]}")

    def reference(self) -> str:
        reference = self._problem.parameter.get("reference_answer")
        if reference is None:
            raise LookupError(f"{self.identifier} has no reference answer")
        return str(reference)


@functools.cache
def _package() -> tuple[dict[str, Any], dict[str, Any]]:
    sys.modules["torch"] = _no_torch()
    environment: Any = importlib.import_module("Gym.environment")
    environment.timeout = _no_timeout
    problems = importlib.import_module("Gym.environments").identifier2environment
    controllers = importlib.import_module("Gym.parameter_controllers").identifier2controller
    return problems, controllers


def _no_torch() -> types.ModuleType:
    torch: Any = types.ModuleType("torch")
    torch.manual_seed = lambda seed: None
    torch.cuda = types.SimpleNamespace(manual_seed_all=lambda seed: None)
    return torch


def _no_timeout(seconds: float) -> Any:
    return lambda function: function
