"""Devices that are not there, for tests that lower kernels for them."""

import contextlib
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def absent_gpu() -> Iterator[None]:
    """Name a GPU that is not there: Pallas Triton of jax 0.12 asks which one it is lowered for."""
    device = jax.sharding.AbstractDevice("NVIDIA H100 80GB HBM3", 132, platform="gpu")
    mesh = jax.sharding.AbstractMesh(
        (1,), ("x",), (jax.sharding.AxisType.Auto,), abstract_device=device
    )
    with jax.sharding.use_abstract_mesh(mesh):
        yield
