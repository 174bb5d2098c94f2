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
import contextlib
import importlib.metadata
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
from models.dispatch import SLACK
from models.execution import Execution
from models.kernels import Grouped
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

SPLASH = ("splash_mha_fwd", "splash_mha_dq", "splash_mha_dkv")
CUDNN = ("cudnn_fwd", "cudnn_bwd")

AUTO = Execution()


@dataclass(frozen=True)
class Target:
    """Chips to compile for, and how a layer lies on them."""

    package: str  # brings the compiler
    topology: dict[str, str]
    mesh: tuple[int, int, int]  # fsdp, expert, tensor
    attention: tuple[str, ...]  # kernels that must be there, the forward one first
    experts: str  # and those of the grouped products
    choices: Execution = AUTO  # of kernels; by default the devices decide

    def expected(self) -> dict[str, dict[str, int]]:
        """Kernels of the forward and of the gradient, and how often at least they are called.

        The layer is computed again for its gradient, but for the last product.
        """
        product, transposed, outer = (f"{self.experts}_{name}" for name in Grouped._fields)
        return {
            "forward": {product: 2, self.attention[0]: 1},
            "gradient": {product: 1, transposed: 2, outer: 2, **dict.fromkeys(self.attention, 1)},
        }

    def devices(self) -> list[Any]:
        """Describe the chips."""
        return list(topologies.get_topology_desc(**self.topology).devices)


def _tpu(name: str) -> dict[str, str]:
    return {"platform": "tpu", "topology_name": name}


CUDA = {"platform": "cuda", "topology_name": "h200", "topology": "1x1x8", "target_config": H200}
TARGETS = {
    "v5e": Target("libtpu", _tpu("v5e:2x4"), (2, 2, 2), SPLASH, "megablox"),
    "v5p": Target("libtpu", _tpu("v5p:2x2x1"), (2, 2, 1), SPLASH, "megablox"),
    "v6e": Target("libtpu", _tpu("v6e:2x4"), (4, 1, 2), SPLASH, "megablox"),
    "h200": Target("jax_cuda12_plugin", CUDA, (2, 2, 2), CUDNN, "hopper"),
    "h200-triton": Target(
        "jax_cuda12_plugin", CUDA, (2, 2, 2), CUDNN, "triton", Execution(experts="triton")
    ),
}


@dataclass(frozen=True)
class Report:
    """What one executable is."""

    target: str
    mesh: str
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
            f"| {self.target} | {self.mesh} | {self.program} | {found or 'none'} | "
            f"{self.largest[1]} ({self.largest[0] / self.dense:.2f}) | {sizes} | "
            f"{self.bound / 2**20:,.0f} | {self.seconds:.0f} |"
        )


HEADER = (
    "| target | mesh | program | kernels | largest array (share of a dense expansion) | "
    "arguments MiB | temporary MiB | bound MiB | compile s |\n|" + " --- |" * 9
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
    execution = resolve(target.choices, LAYER, devices[0])
    need = needed(mesh, rows, seq, execution)
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
    reports, expected = [], target.expected()
    for program, (function, arguments) in programs.items():
        text, memory, seconds = compile_for(devices, function, arguments)
        found, wanted = kernels(text), expected[program]
        reports.append(
            Report(
                target=name,
                mesh=" × ".join(f"{axis} {n}" for axis, n in mesh.shape.items() if n > 1),
                program=program,
                kernels=found,
                missing={kernel: n for kernel, n in wanted.items() if found[kernel] < n},
                largest=largest_array(text),
                dense=dense_elements(mesh, rows, seq),
                arguments=memory.argument_size_in_bytes,
                temporary=memory.temp_size_in_bytes,
                bound=need[program],
                seconds=seconds,
            )
        )
    return reports


def compile_for(
    devices: list[Any], function: Callable, arguments: Any, **options: Any
) -> tuple[str, Any, float]:
    """Return the executable's text, its memory, and the processor time it took."""
    start = time.process_time()
    # A Hopper kernel asks the devices of the process for the number of their processors.
    with mock.patch.object(jax, "devices", lambda *_: devices):
        compiled = jax.jit(function, **options).lower(*arguments).compile()
    return compiled.as_text() or "", compiled.memory_analysis(), time.process_time() - start


def dense_elements(mesh: Mesh, rows: int, seq: int) -> int:
    """A chip's share of tokens × experts × hidden width: each token, for every expert."""
    shape = mesh.shape
    tokens = rows * seq // (mesh.size // shape["tensor"])
    return tokens * LAYER.num_experts * LAYER.mlp // shape["tensor"]


def needed(mesh: Mesh, rows: int, seq: int, execution: Execution) -> dict[str, int]:
    """Bytes that the programs may hold besides their arguments, given the rows of one chip.

    The forward: the experts' weights gathered and in 16 bits, and every activation at once, with
    the slack of the buffers, the sums of experts in float32. The gradient: activations and their
    gradients, the weights, and their gradients in float32.
    """
    split, expert = mesh.shape["tensor"], mesh.shape["expert"]
    tokens, mlp = rows * seq, LAYER.mlp // split
    weights = 2 * LAYER.num_experts // expert * 3 * LAYER.embed * mlp
    copies = (
        int(SLACK * tokens * LAYER.experts_per_token)
        if expert > 1
        else tokens * LAYER.experts_per_token
    )
    experts = copies * (2 * LAYER.embed + 3 * mlp) + 3 * tokens * expert * LAYER.embed
    heads = (2 * LAYER.num_heads + 2 * LAYER.num_kv_heads) // split * LAYER.head_dim
    attention = tokens * (heads + 4 * LAYER.embed)
    mask = rows * seq * seq if execution.attention == "cudnn" else 0
    activations = 2 * (experts + attention + mask)
    return {"forward": weights + activations, "gradient": 3 * weights + 2 * activations}


def control(target: Target, rows: int) -> Report:
    """Compile a bare `ragged_dot` of the first product, which expands densely on a GPU."""
    devices = target.devices()
    place = jax.sharding.SingleDeviceSharding(devices[0])
    shapes = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=place)
        for shape, dtype in (
            ((rows * LAYER.experts_per_token, LAYER.embed), jnp.bfloat16),
            ((LAYER.num_experts, LAYER.embed, 2 * LAYER.mlp), jnp.bfloat16),
            ((LAYER.num_experts,), jnp.int32),
        )
    ]
    text, memory, seconds = compile_for(devices, jax.lax.ragged_dot, shapes)
    return Report(
        target="control",
        mesh="",
        program="ragged_dot",
        kernels=kernels(text),
        missing={},
        largest=largest_array(text),
        dense=rows * LAYER.num_experts * LAYER.mlp,
        arguments=memory.argument_size_in_bytes,
        temporary=memory.temp_size_in_bytes,
        bound=0,
        seconds=seconds,
    )


def goals(reports: list[Report]) -> list[dict[str, Any]]:
    """What must hold of each executable."""
    found = []
    for report in reports:
        name = f"{report.target} {report.program}".replace(" ", "_")
        if report.target == "control":
            found.append(goal(f"{name}_is_dense", report.is_dense, True))
            continue
        share = report.largest[0] / report.dense
        found += [
            goal(f"{name}_kernels_missing", report.missing, {}),
            goal(f"{name}_largest_over_dense", round(share, 3), 1.0, not report.is_dense),
            goal(
                f"{name}_temporary_over_needed",
                round(report.temporary / report.bound, 3),
                1.0,
                report.temporary <= report.bound,
            ),
        ]
    return found


def goal(name: str, value: Any, goal: Any, holds: bool | None = None) -> dict[str, Any]:
    holds = value == goal if holds is None else holds
    return {"name": name, "value": value, "goal": goal, "holds": holds}


def main() -> None:
    """Compile for the targets and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--targets", nargs="+", choices=list(TARGETS))
    parser.add_argument("--rows", type=int, default=2, help="packed rows of one chip")
    parser.add_argument("--seq", type=int, default=4096, help="tokens of a row")
    arguments = parser.parse_args()
    chosen = arguments.targets or [
        name for name, target in TARGETS.items() if importlib.util.find_spec(target.package)
    ]
    if not chosen:
        parser.error("no package that compiles for a target is installed; see the top of this file")
    print(HEADER, flush=True)
    reports = []
    for name in chosen:
        for report in examine(name, TARGETS[name], arguments.rows, arguments.seq):
            print(report.row(), flush=True)
            reports.append(report)
    if "h200" in chosen:
        reports.append(control(TARGETS["h200"], 1024))
        print(reports[-1].row(), flush=True)
    print(json.dumps({"versions": versions(), "goals": goals(reports)}))


def versions() -> dict[str, str]:
    """Versions of what compiled."""
    found = {}
    for name in ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


if __name__ == "__main__":
    main()
