"""Fixtures of the library's tests: the harness module and one child process per test module."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_spec = importlib.util.spec_from_file_location(
    "library_harness", Path(__file__).with_name("harness.py")
)
assert _spec and _spec.loader
_harness = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_harness)


@pytest.fixture(scope="session")
def harness() -> Any:
    return _harness


@pytest.fixture(scope="module")
def programs() -> Iterator[Any]:
    with _harness.Programs() as running:
        yield running
