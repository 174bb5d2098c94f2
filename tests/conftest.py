"""Settings of every test: fake devices, shape and type checks in both packages, strict promotion.

There is no persistent compilation cache: tests count compilations, and on a fresh checkout it would
be empty.
"""

import os
import signal
import sys

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


@pytest.fixture
def getkey():
    """A function that gives a new PRNG key at each call, the same ones in every run."""
    root = jax.random.key(0)
    calls = iter(range(sys.maxsize))
    return lambda: jax.random.fold_in(root, next(calls))
