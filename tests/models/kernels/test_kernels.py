"""The choice of a kernel by device, and what is said of one that is not there."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from models import kernels
from models.errors import ModelError

TPU = SimpleNamespace(platform="tpu")
CPU = SimpleNamespace(platform="cpu")


def gpu(capability: str) -> SimpleNamespace:
    return SimpleNamespace(platform="gpu", compute_capability=capability)


@pytest.mark.parametrize(
    ("device", "dtype", "grouped", "attention"),
    [
        (TPU, "bfloat16", "megablox", "splash"),
        (TPU, "float32", "megablox", "splash"),
        (gpu("9.0"), "bfloat16", "hopper", "cudnn"),
        (gpu("9.0"), "float32", "triton", None),
        (gpu("8.0"), "bfloat16", "triton", "cudnn"),
        (gpu("10.0"), "bfloat16", "triton", "cudnn"),
        (gpu("7.5"), "bfloat16", None, None),
        (gpu("gfx942"), "bfloat16", None, None),
        (CPU, "float32", None, None),
    ],
)
def test_kernels_follow_the_device(device, dtype, grouped, attention):
    assert kernels.grouped_backend(device, dtype) == grouped
    assert kernels.attention_backend(device, dtype) == attention


def test_every_kernel_loads_on_a_cpu():
    for name in kernels.GROUPED:
        assert all(callable(function) for function in kernels.grouped(name))
    for name in kernels.ATTENTION:
        assert callable(kernels.attention(name))


def test_unknown_kernel_is_refused_with_the_names_there_are():
    with pytest.raises(ModelError, match="megablox, hopper, triton"):
        kernels.grouped("dense")
    with pytest.raises(ModelError, match="splash, cudnn"):
        kernels.attention("flash")


def test_missing_kernel_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "models.kernels.splash", None)
    with pytest.raises(ModelError, match=r"kernel splash cannot be loaded .*; install jax"):
        kernels.attention("splash")


def test_kernels_are_imported_only_when_asked_for():
    code = (
        "import sys, models.kernels\n"
        "assert not [name for name in sys.modules if 'pallas' in name], 'pallas is loaded'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
