"""Stands in for textarena."""

import importlib

from textarena.envs import registration


def make(name, **options):
    module, _, kind = registration.ENV_REGISTRY[name].entry_point.partition(":")
    return getattr(importlib.import_module(module), kind)(**options)
