"""The devices that a plan is for: described by the compiler's own tables, or those of this machine.

    v5p:4x4x4, v6e:8x8, v5e:4x8, v4:2x2x4    chips of a Cloud TPU slice, four to a host
    h200:8, h100:16                          NVIDIA GPUs, at most eight to a host
    local                                    what jax finds here

The rates are the makers' published peaks. A processor of this machine has none, so two short
loops measure it. Other chips are one line in `CHIPS`.
"""

import contextlib
import dataclasses
import functools
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spade_jax.errors import ConfigError

GIB = 2**30
GPUS_OF_A_HOST = 8


@dataclass(frozen=True)
class Chip:
    """What one device can do, at most."""

    name: str
    flops_per_s: float  # of 16-bit products summed in float32 (a processor: of float32 ones)
    bytes_per_s: float  # of its own memory
    link_bytes_per_s: float | None  # to other chips, all its links together; None: not known
    memory: int  # bytes that programs can have


CHIPS = {
    "v4": Chip("TPU v4", 275e12, 1228e9, 300e9, int(30.75 * GIB)),
    "v5e": Chip("TPU v5e", 197e12, 819e9, 200e9, int(15.75 * GIB)),
    "v5p": Chip("TPU v5p", 459e12, 2765e9, 600e9, int(95.74 * GIB)),
    "v6e": Chip("TPU v6e", 918e12, 1640e9, 448e9, int(31.25 * GIB)),
    "h100": Chip("NVIDIA H100", 989e12, 3350e9, 450e9, 81_559 * 2**20),
    "h200": Chip("NVIDIA H200", 989e12, 4800e9, 450e9, 143_771 * 2**20),
}
HOST_SHAPES = {"v4": "2x2x1", "v5e": "2x2", "v5p": "2x2x1", "v6e": "2x2"}  # of a slice of several
KINDS = {  # what jax calls them
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H200": "h200",
}
GPU_SHARE = 0.75  # of a GPU's memory that jax takes, unless XLA_PYTHON_CLIENT_MEM_FRACTION says it

_HOPPER = """
platform_name: "CUDA"
device_description_str: "{name}"
dnn_version_info {{ major: 9 minor: 8 }}
gpu_device_info {{
  cuda_compute_capability {{ major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }}
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472 l2_cache_size: 52428800
  device_memory_size: {memory} memory_bandwidth: {bytes_per_s:.0f}
}}
"""

_NAME = re.compile(r"(v4|v5e|v5p|v6e):(\d+(?:x\d+){1,2})|(h100|h200):(\d+)|local")


@dataclass(frozen=True)
class Site:
    """The devices of a run, and which of them share a host."""

    name: str
    chip: Chip
    devices: list[Any]
    # one host as a topology of its own: the compilers of some TPUs take no part of a larger one;
    # none where there is one host
    apart: Sequence[Any] = ()

    @property
    def hosts(self) -> list[list[Any]]:
        """The devices of each host."""
        found: dict[int, list[Any]] = {}
        for device in self.devices:
            found.setdefault(device.process_index, []).append(device)
        return list(found.values())

    @property
    def num_hosts(self) -> int:
        return len(self.hosts)

    @property
    def host_chips(self) -> int:
        """Devices of one host; the others are alike."""
        return len(self.devices) // self.num_hosts


def check_name(name: str) -> None:
    """Refuse what names no topology.

    Raises:
        ConfigError: says which there are.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"--topology {name!r} is unknown; expected local, or chips and how they are joined: "
            "v4:2x2x4, v5e:4x8, v5p:4x4x4, v6e:8x8, or a number of GPUs: h100:8, h200:8"
        )


def environment(name: str) -> Mapping[str, str]:
    """What must be in the environment before jax is imported, to compile for these devices."""
    check_name(name)
    if name == "local":
        return {}
    own = {"JAX_PLATFORMS": "cpu"}  # the device that is here, if any, stays free
    if name.startswith("h"):
        # The plugin would ask for a driver, and there is no GPU on which to try variants.
        own |= {
            "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
            "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0".strip(),
        }
    return own


def find_site(name: str) -> Site:
    """Describe the devices.

    Raises:
        ConfigError: no such topology, or the package is missing that compiles for it.
    """
    check_name(name)
    if name == "local":
        return _local()
    family, _, shape = name.partition(":")
    from jax.experimental import topologies  # here: the environment is set before jax is imported

    if family.startswith("h"):
        wanted: dict[str, Any] = _gpus(family, int(shape))
        extra = "cuda"
    else:
        wanted, extra = {"platform": "tpu", "topology_name": name}, "tpu"
    apart: list[Any] = []
    try:
        devices = list(topologies.get_topology_desc(**wanted).devices)
        if extra == "tpu" and len({device.process_index for device in devices}) > 1:
            wanted["topology_name"] = f"{family}:{HOST_SHAPES[family]}"
            apart = list(topologies.get_topology_desc(**wanted).devices)
    except Exception as error:  # of the plugins, which agree on no type
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"--topology {name} cannot be described: {first}; it needs the extra {extra} (pip "
            f"install -e '.[{extra}]') and a shape that is sold"
        ) from error
    chip = CHIPS[family]
    if family.startswith("h"):
        share = float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", GPU_SHARE))
        chip = dataclasses.replace(chip, memory=int(chip.memory * share))
    return Site(name, chip, devices, apart)


def _gpus(family: str, count: int) -> dict[str, Any]:
    """The arguments that describe GPUs, eight to a host."""
    hosts = -(-count // GPUS_OF_A_HOST)
    if count < 1 or count % hosts or (hosts > 1 and count % GPUS_OF_A_HOST):
        raise ConfigError(
            f"--topology {family}:{count} is {count} GPUs; expected 1 to {GPUS_OF_A_HOST}, or a "
            f"multiple of {GPUS_OF_A_HOST}"
        )
    chip = CHIPS[family]
    target = _HOPPER.format(name=chip.name, memory=chip.memory, bytes_per_s=chip.bytes_per_s)
    shape = f"1x{hosts}x{count // hosts}"
    return {
        "platform": "cuda",
        "topology_name": family,
        "topology": shape,
        "target_config": target,
    }


def _local() -> Site:
    import jax

    devices, host = jax.devices(), jax.local_devices()
    device = host[0]
    if device.platform == "cpu":
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return Site("local", _measured(pages, len(host)), devices)
    if device.device_kind not in KINDS:
        raise ConfigError(
            f"--topology local: nothing is known of {device.device_kind}; known are "
            f"{', '.join(KINDS)}"
        )
    chip, stats = CHIPS[KINDS[device.device_kind]], device.memory_stats()
    if stats and "bytes_limit" in stats:
        chip = dataclasses.replace(chip, memory=stats["bytes_limit"])
    return Site("local", chip, devices)


def _measured(memory: int, count: int) -> Chip:
    """One of `count` devices that share this machine's processors and memory."""
    import jax
    import jax.numpy as jnp

    place = jax.local_devices()[0]
    square = jax.device_put(jnp.ones((1024, 1024), jnp.float32), place)
    long = jax.device_put(jnp.ones(2**26, jnp.float32), place)  # far more than a cache holds
    multiply = jax.jit(lambda x: x @ x)
    read = jax.jit(lambda x: x.sum())
    flops = 2 * 1024**3 / _best_s(functools.partial(multiply, square))
    bytes_per_s = long.nbytes / _best_s(functools.partial(read, long))
    return Chip(
        f"processor (measured; {count} devices share it)",
        flops / count,
        bytes_per_s / count,
        None,
        memory // count,
    )


def _best_s(call: Callable[[], Any]) -> float:
    call().block_until_ready()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        call().block_until_ready()
        times.append(time.perf_counter() - start)
    return min(times)


@contextlib.contextmanager
def standing_in(devices: Sequence[Any]) -> Iterator[None]:
    """Let jax take these for the devices of the process: the Hopper kernels ask for the number of
    their processors while they are traced.
    """
    import jax

    own = jax.devices
    jax.devices = lambda *_: list(devices)
    try:
        yield
    finally:
        jax.devices = own
