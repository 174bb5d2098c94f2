"""Compile one layer of Qwen3-30B-A3B for chips that are not here, and say what is in the programs.

    python benchmarks/aot.py [--targets v5e v5p v6e h200] [--seq 4096] [--rows 2]

TPU targets need `pip install "jax[tpu]==0.10.2"`; h200 needs `jax-cuda12-plugin[with-cuda]==0.10.2`
and this project's other requirements; no chip, and so nothing is run: the report says that the
forward and the gradient build, which kernels they call, how much memory a chip needs and how long
the compiler took, never how fast they are. Without --targets, those whose packages are installed.

A dense expansion over experts (every token computed by every expert) is looked for in two ways: the
grouped kernels must be there once for each product, and no array may have more elements than one
chip's share of tokens × experts × hidden width. The last target of a GPU is a control: a bare
`jax.lax.ragged_dot`, which has to be found out. The last line is JSON.
"""

import argparse
import importlib.util
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # or the plugin asks for a driver
os.environ["XLA_FLAGS"] = "--xla_gpu_autotune_level=0"  # there is no GPU to try variants on

import jax
import jax.numpy as jnp
from hlo import kernels, largest_array
from jax.experimental import topologies
from jax.sharding import Mesh

from models.backends import resolve
from models.blocks import Call, run_packed
from models.config import TransformerConfig
from models.execution import Execution
from models.layers import rotary_angles
from models.sharding import build_mesh, data_sharding, param_shardings
from models.transformer import abstract_params

LAYER = TransformerConfig(
    family="qwen3_moe",
    vocab_size=256,  # not part of the layer
    num_layers=1,
    embed=2048,
    num_heads=32,
    num_kv_heads=4,
    head_dim=128,
    mlp=768,
    num_experts=128,
    experts_per_token=8,
    rope_theta=1_000_000.0,
    qk_norm=True,
    tied_head=True,
    scale_embedding=False,
)

H200 = """
platform_name: "CUDA"
device_description_str: "NVIDIA H200"
dnn_version_info { major: 9 minor: 8 }
gpu_device_info {
  cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472 l2_cache_size: 52428800
  device_memory_size: 150120000000 memory_bandwidth: 4800000000000
}
"""

TPU_KERNELS = {
    "forward": {"megablox_product": 2, "splash_mha_fwd": 1},
    "gradient": {
        "megablox_product": 2,  # computed again: layers are rematerialised
        "megablox_transposed": 2,
        "megablox_outer": 2,
        "splash_mha_fwd": 1,
        "splash_mha_dq": 1,
        "splash_mha_dkv": 1,
    },
}
GPU_KERNELS = {
    "forward": {"hopper_product": 2, "cudnn_fwd": 1},
    "gradient": {
        "hopper_product": 2,
        "hopper_transposed": 2,
        "hopper_outer": 2,
        "cudnn_fwd": 1,
        "cudnn_bwd": 1,
    },
}


@dataclass(frozen=True)
class Target:
    """Chips to compile for, and how a layer lies on them."""

    package: str  # brings the compiler
    topology: dict[str, str]
    mesh: tuple[int, int, int]  # fsdp, expert, tensor
    kernels: dict[str, dict[str, int]]

    def devices(self) -> list[Any]:
        """Describe the chips."""
        return list(topologies.get_topology_desc(**self.topology).devices)


def _tpu(name: str) -> dict[str, str]:
    return {"platform": "tpu", "topology_name": name}


TARGETS = {
    "v5e": Target("libtpu", _tpu("v5e:2x4"), (2, 2, 2), TPU_KERNELS),
    "v5p": Target("libtpu", _tpu("v5p:2x2x1"), (2, 2, 1), TPU_KERNELS),
    "v6e": Target("libtpu", _tpu("v6e:2x4"), (4, 1, 2), TPU_KERNELS),
    "h200": Target(
        "jax_cuda12_plugin",
        {"platform": "cuda", "topology_name": "h200", "topology": "1x1x8", "target_config": H200},
        (2, 2, 2),
        GPU_KERNELS,
    ),
}


@dataclass(frozen=True)
class Report:
    """What one executable is."""

    target: str
    program: str
    kernels: dict[str, int]
    missing: dict[str, int]  # kernels that should be there, and how often
    largest: tuple[int, str]  # array
    dense: int  # elements of the smallest dense expansion
    arguments: int  # bytes a chip, as are the next two
    temporary: int
    bound: int  # of the temporary ones
    seconds: float

    @property
    def is_dense(self) -> bool:
        """Whether an array is larger than one that holds every token for every expert."""
        return self.largest[0] > self.dense

    def row(self) -> str:
        """One line of the table."""
        found = ", ".join(f"{count} {name}" for name, count in sorted(self.kernels.items()))
        sizes = " | ".join(f"{size / 2**20:,.0f}" for size in (self.arguments, self.temporary))
        return (
            f"| {self.target} | {self.program} | {found or 'none'} | "
            f"{self.largest[1]} ({self.largest[0] / self.dense:.2f}) | {sizes} | "
            f"{self.bound / 2**20:,.0f} | {self.seconds:.0f} |"
        )


HEADER = (
    "| target | program | kernels | largest array (share of a dense expansion) | "
    "arguments MiB | temporary MiB | bound MiB | compile s |\n|" + " --- |" * 8
)


def layer(mesh: Mesh, execution: Execution) -> Callable:
    """The model's own block over packed rows, as function(blocks, x, positions, segment_ids)."""

    def run(blocks: Any, x: jax.Array, positions: jax.Array, segment_ids: jax.Array) -> jax.Array:
        angles = rotary_angles(positions, LAYER.head_dim, LAYER.rope_theta)
        call = Call(LAYER, execution, mesh, *angles, segment_ids > 0)
        return run_packed(call, blocks, x, segment_ids)[0]

    return run


def gradient(forward: Callable) -> Callable:
    """Gradients of the weights and of the input, given that of the output."""

    def run(blocks: Any, x: Any, positions: Any, segment_ids: Any, grad: Any) -> Any:
        output, backward = jax.vjp(lambda *a: forward(*a, positions, segment_ids), blocks, x)
        return backward(grad.astype(output.dtype))

    return run


def examine(name: str, target: Target, rows: int, seq: int) -> list[Report]:
    """Compile the forward and the gradient for one target."""
    devices = target.devices()
    mesh = build_mesh(1, *target.mesh, devices=devices)
    execution = resolve(Execution(layers="unrolled"), LAYER, devices[0])
    rows *= mesh.size // mesh.shape["tensor"]

    def array(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=data_sharding(mesh))

    blocks = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        abstract_params(LAYER, execution)["blocks"],
        param_shardings(LAYER, mesh, execution)["blocks"],
    )
    x = array((rows, seq, LAYER.embed), jnp.dtype(execution.compute_dtype))
    ids = array((rows, seq), jnp.int32)
    forward = layer(mesh, execution)
    programs = {
        "forward": (forward, (blocks, x, ids, ids)),
        "gradient": (gradient(forward), (blocks, x, ids, ids, x)),
    }
    reports = []
    for program, (function, arguments) in programs.items():
        start = time.perf_counter()
        # A Hopper kernel asks the devices of the process for the number of their processors.
        with mock.patch.object(jax, "devices", lambda *_: devices):
            compiled = jax.jit(function).lower(*arguments).compile()
        seconds = time.perf_counter() - start
        memory, text = compiled.memory_analysis(), compiled.as_text()
        found, wanted = kernels(text), target.kernels[program]
        reports.append(
            Report(
                target=f"{name} {dict(mesh.shape)}",
                program=program,
                kernels=found,
                missing={k: n for k, n in wanted.items() if found[k] < n},
                largest=largest_array(text),
                dense=0,
                arguments=memory.argument_size_in_bytes,
                temporary=memory.temp_size_in_bytes,
                bound=0,
                seconds=seconds,
            )
        )
        open(f"/tmp/aot_{name}_{program}.txt", "w").write(text)
    return reports


if __name__ == "__main__":
    import sys
    for n in sys.argv[1:]:
        for r in examine(n, TARGETS[n], 2, 4096): print(r, flush=True)
