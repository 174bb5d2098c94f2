"""Accelerator kernels behind plain functions; each module is imported only when it is asked for.

    grouped("megablox" | "hopper" | "triton")    the three products of a mixture of experts
    attention("splash" | "cudnn")                packed causal attention
    paged("xla" | "splash" | "cudnn")            attention over the pages of a cache
    grouped_backend(device, dtype), attention_backend(device)    what a device runs best

The functions see the arrays of one device: call them inside `shard_map`. They have no sharding
rules of their own.
"""

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from models.errors import ModelError

GROUPED = ("megablox", "hopper", "triton")
ATTENTION = ("splash", "cudnn")


class Grouped(NamedTuple):
    """Products of consecutive groups of rows, each with its own matrix.

    Sums are float32, results have the dtype of the inputs; rows past the sum of `group_sizes` give
    zeros and count for nothing. None of them has a derivative: they are each other's.
    """

    product: Callable  # (x [rows, in], w [experts, in, out], group_sizes) -> [rows, out]
    transposed: Callable  # (grad [rows, out], w [experts, in, out], group_sizes) -> [rows, in]
    outer: Callable  # (x [rows, in], grad [rows, out], group_sizes) -> [experts, in, out]


def grouped(name: str) -> Grouped:
    """Return the products of one back-end of GROUPED, each under its name in profiles."""
    module = _load(name, GROUPED, "grouped product")

    def named(field: str) -> Callable:
        return jax.named_scope(f"{name}_{field}")(getattr(module, field))

    return Grouped(*(named(field) for field in Grouped._fields))


def attention(name: str) -> Callable:
    """Return the function of one back-end of ATTENTION.

    (query [rows, seq, heads, dim], key and value [rows, seq, kv_heads, dim], segment_ids
    [rows, seq]) -> [rows, seq, heads, dim]: causal within runs of equal ids, zeros where the id is
    0, differentiable.
    """
    return _load(name, ATTENTION, "attention").attend


def paged(name: str) -> Any:
    """Return the module that keeps and reads the pages of a cache for an attention back-end.

    It has `shapes`, `write`, `attend`, HEADS_AXIS and TOKENS_AXIS: see `models.paged`, which is the
    one without a kernel.
    """
    modules = {
        "xla": "models.paged",
        "splash": "models.kernels.ragged_pages",
        "cudnn": "models.kernels.triton_pages",
    }
    return _load(modules.get(name, name), tuple(modules.values()), "attention over pages")


def _load(name: str, names: tuple[str, ...], what: str) -> Any:
    if name not in names:
        raise ModelError(f"{name!r} is not a kernel for {what}; use one of {', '.join(names)}")
    try:
        return importlib.import_module(name if "." in name else f"models.kernels.{name}")
    except ImportError as error:
        raise ModelError(
            f"the kernel {name} cannot be loaded ({error}); install jax as requirements.txt says, "
            "or choose another back-end"
        ) from error


def grouped_backend(device: Any, dtype: Any) -> str | None:
    """Name the kernel of GROUPED for a device and a dtype, or None where there is none."""
    if device.platform == "tpu":
        return "megablox"
    capability = _capability(device)
    if capability is None or capability < (8, 0):
        return None
    # The Hopper kernel multiplies 16-bit numbers with instructions that only Hopper has.
    hopper = capability[0] == 9 and jnp.dtype(dtype).itemsize == 2
    return "hopper" if hopper else "triton"


def attention_backend(device: Any, dtype: Any) -> str | None:
    """Name the kernel of ATTENTION for a device and a dtype, or None where there is none."""
    if device.platform == "tpu":
        return "splash"
    capability = _capability(device)
    if capability is None or capability < (8, 0) or jnp.dtype(dtype).itemsize != 2:
        return None
    return "cudnn"


def _capability(device: Any) -> tuple[int, int] | None:
    """Return the compute capability of an NVIDIA GPU."""
    text = str(getattr(device, "compute_capability", ""))
    major, _, minor = text.partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None
