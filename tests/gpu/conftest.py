"""The tests of this folder run on a GPU, where the others have the fake devices of a CPU.

They are marked `gpu`, and run by themselves: `python -m pytest -m gpu`, or launch/gpu_check.sh.
"""

import jax
import pytest
from jax.extend.backend import clear_backends


@pytest.fixture(scope="session", autouse=True)
def on_the_gpu() -> None:
    """Let go of the CPU that tests/conftest.py chose; without a GPU the tests fail here."""
    clear_backends()
    jax.config.update("jax_platforms", "cuda")
    assert jax.default_backend() == "gpu"
