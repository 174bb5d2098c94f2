"""What `auto` becomes on each kind of device, and names that cannot run."""

import dataclasses
import logging
from types import SimpleNamespace

import jax
import pytest

from models import backends
from models.config import TransformerConfig
from models.errors import ModelError
from models.execution import PLAIN, Execution

MODEL = TransformerConfig(head_dim=64)
TPU = SimpleNamespace(platform="tpu", device_kind="TPU v5 lite")
HOPPER = SimpleNamespace(platform="gpu", device_kind="NVIDIA H200", compute_capability="9.0")
OLD = SimpleNamespace(platform="gpu", device_kind="Tesla T4", compute_capability="7.5")


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        (None, PLAIN),
        (TPU, Execution("scanned", "bfloat16", "float32", "splash", "full", "megablox")),
        (HOPPER, Execution("scanned", "bfloat16", "float32", "cudnn", "full", "hopper")),
        (OLD, Execution("scanned", "bfloat16", "float32", "xla", "full", "blocks")),
    ],
)
def test_auto_follows_the_device(device, expected, caplog):
    caplog.set_level(logging.INFO)
    device = jax.devices()[0] if device is None else device
    settled = backends.resolve(Execution(), MODEL, device)
    assert settled == expected
    assert backends.resolve(settled, MODEL, device) == settled
    assert f"{expected.layers} layers" in caplog.text and device.device_kind in caplog.text


def test_experts_by_name_stay():
    assert backends.resolve(Execution(experts="triton"), MODEL, HOPPER).experts == "triton"
    assert backends.resolve(Execution(experts="blocks"), MODEL, TPU).experts == "blocks"


def test_auto_passes_over_a_kernel_that_does_not_take_the_model():
    wide = dataclasses.replace(MODEL, head_dim=192)
    assert backends.resolve(Execution(), wide, HOPPER).attention == "xla"
    full = Execution(compute_dtype="float32")
    assert backends.resolve(full, MODEL, HOPPER).attention == "xla"


@pytest.mark.parametrize(
    ("execution", "model", "device", "message"),
    [
        (Execution(attention="splash"), MODEL, None, "splash does not run on cpu .* set it to xla"),
        (Execution(attention="cudnn"), MODEL, TPU, "cudnn does not run on tpu .* set it to splash"),
        (Execution(attention="cudnn"), MODEL, OLD, "cudnn does not run on gpu .Tesla T4."),
        (
            Execution(attention="cudnn", compute_dtype="float32"),
            MODEL,
            HOPPER,
            "cudnn does not run on gpu .* in float32; set it to xla",
        ),
        (
            Execution(experts="megablox"),
            MODEL,
            None,
            "execution.experts=megablox does not run on cpu .* in float32; set it to blocks, or",
        ),
        (
            Execution(experts="hopper", compute_dtype="float32"),
            MODEL,
            HOPPER,
            "hopper does not run on gpu .* in float32; set it to blocks or triton",
        ),
        (
            Execution(attention="cudnn"),
            dataclasses.replace(MODEL, head_dim=192),
            HOPPER,
            "at most 128 .* model.head_dim=192",
        ),
    ],
)
def test_a_named_kernel_that_cannot_run_is_an_error(execution, model, device, message):
    with pytest.raises(ModelError, match=message):
        backends.resolve(execution, model, jax.devices()[0] if device is None else device)
