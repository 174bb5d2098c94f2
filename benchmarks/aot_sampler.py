"""Compile the sampler of Qwen3-30B-A3B for chips that are not here, and say what fits beside it.

    python benchmarks/aot_sampler.py [--targets v5p v6e h200] [--context 32768] [--slots 64]

The whole model on the chips of one host, in 16 bits, and the engine's own programs: a run of decode
steps of all slots, and the largest prefill call, of pieces of prompts, each with the drawing of the
next token. Needs what `benchmarks/aot.py` needs.
Nothing is run: the report says that the programs build, which kernels they call, what they hold
besides their arguments, and how many pages of keys and values, and so how many sequences as long as
the context, fit into a chip's memory with the weights and the larger program's temporaries. That no
program copies the cache is seen by what it holds besides, and that none cuts out the pages of a
layer, which would copy all of them in the course of a step, by the shapes of its arrays. The last
line is JSON.
"""

import argparse
import importlib.util
import json
import math
import re
import time
from dataclasses import dataclass
from typing import Any

from aot import TARGETS, goal, versions  # before jax: it prepares for absent chips

# isort: split
import jax
from hlo import kernels
from jax.sharding import Mesh

from models.backends import resolve
from models.cache import cache_sharding, init_cache
from models.execution import Execution
from models.sharding import build_mesh, param_shardings
from spade_jax.config import EngineConfig
from spade_jax.plan.topology import standing_in
from spade_jax.recipes import QWEN3_30B_A3B
from spade_jax.rollout import weights
from spade_jax.rollout.programs import Program, Programs

MODEL = QWEN3_30B_A3B.model
PAGE_TOKENS = 64
PAGES = 8190  # of the cache that is compiled for: a number that is the size of nothing else
PIECES, PIECE = 16, 128  # rows of a prefill call, and tokens of each
RESERVE = 0.06  # of a chip's memory, for what is not ours


@dataclass(frozen=True)
class Host:
    """The chips of one host, how the sampler lies on them, and the kernels it must call."""

    mesh: tuple[int, int]  # expert, tensor
    memory: int  # bytes of a chip
    decode: tuple[str, ...]
    prefill: tuple[str, ...]


RAGGED = ("ragged_paged_attention", "megablox_product")
HOSTS = {
    "v5p": Host((1, 4), 95 * 2**30, RAGGED, RAGGED),
    "v6e": Host((2, 4), 32 * 2**30, RAGGED, RAGGED),
    "h200": Host((2, 4), 141 * 10**9, ("paged_attention", "hopper_product"), ("hopper_product",)),
}


@dataclass(frozen=True)
class Report:
    """What one executable is."""

    host: str
    program: str
    kernels: dict[str, int]
    missing: list[str]
    weights: int  # bytes a chip, as is all that follows
    page: int  # in all layers
    cut_out: int  # arrays as large as a layer of the cache
    temporary: int
    aliased: int  # of the cache, updated in place
    seconds: float

    def row(self) -> str:
        """One line of the table."""
        found = ", ".join(f"{count} {name}" for name, count in sorted(self.kernels.items()))
        sizes = self.weights, self.page * PAGES, self.temporary
        columns = " | ".join(f"{size / 2**20:,.0f}" for size in sizes)
        return f"| {self.host} | {self.program} | {found} | {columns} | {self.seconds:.0f} |"


HEADER = (
    "| host | program | kernels | weights MiB | cache MiB | temporary MiB | "
    "compile s |\n|" + " --- |" * 7
)


def sampler(mesh: Mesh, execution: Execution, context: int, slots: int) -> Programs:
    """The engine's own programs, with the largest prefill call of PIECES pieces."""
    config = EngineConfig(
        slots=slots,
        queue=slots,
        context_tokens=context,
        page_tokens=PAGE_TOKENS,
        kv_tokens=PAGES * PAGE_TOKENS,
        piece_tokens=PIECE,
        prefill_tokens=PIECES * PIECE,
        routing=True,
    )
    return Programs(MODEL, config, mesh, execution)


def examine(name: str, context: int, slots: int) -> list[Report]:
    """Compile both programs for one host."""
    host, devices = HOSTS[name], TARGETS[name].devices()[: math.prod(HOSTS[name].mesh)]
    mesh = build_mesh(1, 1, *host.mesh, devices=devices)
    execution = resolve(Execution(), MODEL, devices[0])
    shapes = weights.abstract_params(MODEL, execution)
    params = jax.tree.map(_lay, shapes, param_shardings(MODEL, mesh, execution))
    cache = jax.eval_shape(
        lambda: init_cache(MODEL, PAGES, PAGE_TOKENS, execution, mesh, routing=True)
    )
    where = cache_sharding(mesh, execution)
    cache = type(cache)(
        *(None if leaf is None else _lay(leaf, at) for leaf, at in zip(cache, where, strict=True))
    )
    programs = sampler(mesh, execution, context, slots)
    reports = []
    for program in (Program("decode"), Program("prefill", PIECES)):
        start = time.process_time()
        with standing_in(devices):
            compiled = programs.lower(program).compile()
        seconds = time.process_time() - start
        text, memory = compiled.as_text() or "", compiled.memory_analysis()
        assert memory is not None, "every compiler that is asked here gives an account"
        found = kernels(text)
        reports.append(
            Report(
                host=name,
                program=program.kind,
                kernels=found,
                missing=[kernel for kernel in getattr(host, program.kind) if not found[kernel]],
                weights=_size(params),
                page=_size(cache) // PAGES,
                cut_out=len(re.findall(rf"\[{PAGES},\d+,\d+", text)),
                temporary=memory.temp_size_in_bytes,
                aliased=memory.alias_size_in_bytes,
                seconds=seconds,
            )
        )
    return reports


def _lay(leaf: Any, sharding: Any) -> Any:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _size(tree: Any) -> int:
    """Bytes of one chip's part."""
    return sum(
        leaf.dtype.itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape))
        for leaf in jax.tree.leaves(tree)
    )


def fits(reports: list[Report], context: int) -> tuple[int, int]:
    """Pages that fit beside the weights, and how many sequences as long as the context."""
    host = HOSTS[reports[0].host]
    temporary = max(report.temporary for report in reports)
    free = host.memory * (1 - RESERVE) - reports[0].weights - temporary
    pages = int(free // reports[0].page)
    return pages, pages * PAGE_TOKENS // context


def goals(reports: list[Report], context: int) -> list[dict[str, Any]]:
    """What must hold of the programs of one host."""
    found = []
    for report in reports:
        name = f"{report.host}_{report.program}"
        copied = report.temporary / (report.page * PAGES)
        found += [
            goal(f"{name}_kernels_missing", report.missing, []),
            goal(f"{name}_cache_updated_in_place", report.aliased >= report.page * PAGES, True),
            goal(f"{name}_layers_cut_out", report.cut_out, 0),
            goal(f"{name}_temporary_over_cache", round(copied, 3), 0.25, copied < 0.25),
        ]
    sequences = fits(reports, context)[1]
    name = f"{reports[0].host}_whole_contexts_that_fit"
    return [*found, goal(name, sequences, 1, sequences >= 1)]


def main() -> None:
    """Compile for the hosts and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--targets", nargs="+", choices=list(HOSTS))
    parser.add_argument("--context", type=int, default=32_768, help="tokens of a sequence")
    parser.add_argument("--slots", type=int, default=64, help="sequences that decode together")
    arguments = parser.parse_args()
    chosen = arguments.targets or [
        name for name in HOSTS if importlib.util.find_spec(TARGETS[name].package)
    ]
    if not chosen:
        parser.error("no package that compiles for a target is installed; see benchmarks/aot.py")
    print(HEADER, flush=True)
    found = []
    for name in chosen:
        reports = examine(name, arguments.context, arguments.slots)
        for report in reports:
            print(report.row(), flush=True)
        pages, sequences = fits(reports, arguments.context)
        print(
            f"{name}: {pages:,} pages of {PAGE_TOKENS} tokens fit beside the weights, "
            f"{pages * PAGE_TOKENS / arguments.slots:,.0f} tokens for each of {arguments.slots} "
            f"slots, or {sequences} sequences of {arguments.context:,}",
            flush=True,
        )
        found += goals(reports, arguments.context)
    print(json.dumps({"versions": versions(), "goals": found}))


if __name__ == "__main__":
    main()
