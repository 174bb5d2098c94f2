"""What the devices at hand run: settles every `auto` of an `Execution`, once, at the start.

A choice that was made by name and cannot run here is an error, never another choice.
"""

import dataclasses
import logging
from typing import Any

import jax
from jax.sharding import Mesh

from models import kernels
from models.config import TransformerConfig
from models.errors import ModelError
from models.execution import Execution

logger = logging.getLogger(__name__)


def resolve(execution: Execution, config: TransformerConfig, device: Any = None) -> Execution:
    """Return the choices with every `auto` settled for `device` (None: the first), and log them.

    Raises:
        ModelError: a kernel was named that this device does not run.
    """
    device = jax.devices()[0] if device is None else device
    accelerated = device.platform != "cpu"
    automatic = {
        "layers": "scanned" if accelerated else "unrolled",
        "compute_dtype": "bfloat16" if accelerated else "float32",
        "param_dtype": "float32",
        "remat": "full" if accelerated else "none",
    }
    settled = {
        name: value for name, value in automatic.items() if getattr(execution, name) == "auto"
    }
    execution = dataclasses.replace(execution, **settled)
    execution = dataclasses.replace(
        execution,
        attention=_attention(execution, config, device),
        experts=_experts(execution, device),
    )
    logger.info(
        "on %s: %s layers, %s activations, %s weights, attention %s, experts %s, remat %s",
        device.device_kind,
        execution.layers,
        execution.compute_dtype,
        execution.param_dtype,
        execution.attention,
        execution.experts,
        execution.remat,
    )
    return execution


def compiler_options(mesh: Mesh) -> dict[str, bool] | None:
    """Options of the compiler for the programs that run the model.

    On a CPU casts are kept: one that is taken back later it leaves out in one program and not in
    another, and in bfloat16 the sampler would not be the learner. Kernels have their own rounding.
    """
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    return {"xla_allow_excess_precision": False} if on_cpu else None


def _attention(execution: Execution, config: TransformerConfig, device: Any) -> Any:
    """Name the attention back-end, and check that it runs."""
    name, dtype = execution.attention, execution.compute_dtype
    best = kernels.attention_backend(device, dtype)
    fits = best != "cudnn" or (config.head_dim % 8 == 0 and config.head_dim <= 128)
    if name == "auto":
        return best if best is not None and fits else "xla"
    if name == "xla":
        return name
    if name != best:
        raise ModelError(
            f"execution.attention={name} does not run on {device.platform} ({device.device_kind}) "
            f"in {dtype}; set it to {best or 'xla'}, or to auto"
        )
    if not fits:
        raise ModelError(
            f"execution.attention={name} takes heads of at most 128 numbers, a multiple of 8, and "
            f"model.head_dim={config.head_dim}; set it to xla, or to auto"
        )
    kernels.attention(name)  # raises if it cannot be loaded
    return name


def _experts(execution: Execution, device: Any) -> Any:
    """Name the back-end of grouped products, and check that it runs."""
    name, dtype = execution.experts, execution.compute_dtype
    best = kernels.grouped_backend(device, dtype) or "blocks"
    # What runs on Ampere and later runs on Hopper as well.
    able = {"blocks", best} | ({"triton"} if best == "hopper" else set())
    if name != "auto" and name not in able:
        raise ModelError(
            f"execution.experts={name} does not run on {device.platform} ({device.device_kind}) "
            f"in {dtype}; set it to {' or '.join(sorted(able))}, or to auto"
        )
    chosen = best if name == "auto" else name
    if chosen != "blocks":
        kernels.grouped(chosen)  # raises if it cannot be loaded
    return chosen
