"""Settings of every test: fake devices, shape and type checks in both packages, strict promotion.

There is no persistent compilation cache: tests count compilations, and on a fresh checkout it would
be empty.
"""

import os
import signal
import sys
from typing import Any

# Jobs that a shell puts into the background ignore interrupts, and what they start inherits that:
# the tests that interrupt a command would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)

assert "jax" not in sys.modules, "jax was imported before tests/conftest.py could set its devices"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

from jaxtyping import install_import_hook  # noqa: E402

# Stays installed for the whole run, so every module of ours that a test imports is checked.
install_import_hook(["models", "spade_jax"], "typechecker.check")

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


MOST_MAPS = 20_000  # of the 65,530 memory maps that Linux lets a process have
MACHINE_TESTS = "tests/spade_jax/envs/"  # look at the machine's processes, mounts and groups


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """What `-n auto` means: each worker takes gigabytes, and few files are long."""
    return min(4, len(os.sched_getaffinity(0)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Files stay whole in one worker, and what watches the machine stays in one altogether."""
    from xdist.scheduler import LoadScopeScheduling

    class Files(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return MACHINE_TESTS if nodeid.startswith(MACHINE_TESTS) else nodeid.split("::")[0]

    return Files(config, log)


@pytest.fixture(autouse=True, scope="module")
def few_memory_maps():
    """Let go of compiled programs: each takes a dozen maps, and a process without any crashes."""
    yield
    with open("/proc/self/maps") as maps:
        if sum(1 for _ in maps) > MOST_MAPS:
            jax.clear_caches()


@pytest.fixture
def getkey():
    """A function that gives a new PRNG key at each call, the same ones in every run."""
    root = jax.random.key(0)
    calls = iter(range(sys.maxsize))
    return lambda: jax.random.fold_in(root, next(calls))
