"""`configs/tiny.py`, the main job, for as long as the tests allow; longer runs are benchmarks."""

import importlib

import pytest

from whole_runs import ROOT


@pytest.mark.slow
def test_nothing_is_compiled_after_the_first_of_three_cycles(monkeypatch):
    """Neither by the sampler nor, as jax itself counts, by anything else."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    goals = importlib.import_module("sampler_cycles").run(3)
    assert [goal["value"] for goal in goals] == [0, 0], goals
