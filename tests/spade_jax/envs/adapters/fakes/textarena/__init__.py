"""Stands in for textarena."""

import importlib

from textarena.envs import registration


class SinglePlayerState:
    rewards = reason = None

    def set_invalid_move(self, reason, reward=-1.0):
        self.reason, self.rewards = reason, {0: reward}


def make(name, **options):
    module, _, kind = registration.ENV_REGISTRY[name].entry_point.partition(":")
    return getattr(importlib.import_module(module), kind)(**options)
