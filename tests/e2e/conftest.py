"""One run of `configs/micro.py` for all tests of whole runs."""

import os

import pytest

from whole_runs import run


@pytest.fixture(scope="session")
def environment(tmp_path_factory):
    """One device, as on a laptop, and compiled programs shared by all runs."""
    cache = tmp_path_factory.mktemp("compiled")
    kept = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    return kept | {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }


@pytest.fixture(scope="session")
def first(tmp_path_factory, environment):
    folder = tmp_path_factory.mktemp("runs") / "first"
    return folder, run(folder, environment)
