"""Plan a run, print it, and refuse what does not fit: see the package."""

import dataclasses
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from spade_jax.config import Config
from spade_jax.errors import ConfigError
from spade_jax.plan.memory import PURPOSES, Memory, account, refusal
from spade_jax.plan.programs import Compiled, Meshes, compile_all, lay_out
from spade_jax.plan.topology import GIB, Site, find_site
from spade_jax.plan.work import PACKING, Assumed, Step, count, default_episode
from spade_jax.terminal import say, visible

REFUSED = 1


@dataclass(frozen=True)
class Plan:
    """All that was found out."""

    config: Config
    site: Site
    meshes: Meshes
    programs: list[Compiled]
    memory: Memory | None  # None: a program did not compile
    step: Step
    assumed: Assumed
    refusal: str  # why it does not fit; empty if it does


def plan(
    config: Config,
    topology: str,
    *,
    episode_tokens: int | None = None,
    utilisation: float = Assumed.utilisation,
    as_json: bool = False,
) -> int:
    """Print what a run of `config` needs on a topology; return the exit code: 0 it fits, 1 not.

    Raises:
        SpadeError, ModelError: the configuration or the topology cannot be.
    """
    found = make_plan(config, find_site(topology), episode_tokens, utilisation)
    if as_json:
        say(json.dumps(plain(found), indent=2))
    else:
        say(*_lines(found))
    if found.refusal:
        print(f"spade-jax: this does not fit: {visible(found.refusal)}", file=sys.stderr)
        return REFUSED
    return 0


def make_plan(config: Config, site: Site, episode_tokens: int | None, utilisation: float) -> Plan:
    """Compile everything, and add it up.

    Raises:
        ConfigError: episodes are longer than the context they are sampled in.
    """
    context = config.engine.context_tokens
    if episode_tokens is not None and episode_tokens > context:
        raise ConfigError(
            f"--episode-tokens {episode_tokens} is more than engine.context_tokens={context}, in "
            f"which every episode has to fit; give at most that"
        )
    meshes = lay_out(config, site)
    assumed = Assumed(episode_tokens or default_episode(config), utilisation=utilisation)
    step = count(config, site, meshes, assumed)
    programs = compile_all(config, site, meshes)
    whole = not any(program.too_large for program in programs)
    memory = account(config, site, meshes, programs) if whole else None
    refused = refusal(config, site, programs, memory)
    return Plan(config, site, meshes, programs, memory, step, assumed, refused)


def plain(found: Plan) -> dict[str, Any]:
    """The plan as JSON; what is not known is null."""
    memory, step, chip = found.memory, found.step, found.site.chip
    return {
        "topology": found.site.name,
        "fits": not found.refusal,
        "refusal": found.refusal or None,
        "chip": dataclasses.asdict(chip),
        "chips": len(found.site.devices),
        "hosts": found.site.num_hosts,
        "learner_mesh": dict(found.meshes.learner.shape),
        "sampler_mesh": dict(found.meshes.sampler.shape),
        "memory": None
        if memory is None
        else {phase.name: {**phase.parts, "total": phase.total} for phase in memory.phases},
        "host_bytes": None if memory is None else memory.host_bytes,
        "programs": [dataclasses.asdict(program) for program in found.programs],
        "step": {
            **{time.name: time._asdict() for time in step.times},
            "roofline_s": step.seconds,
            "expected_s": step.seconds / found.assumed.utilisation,
            "model_flops": step.model_flops,
            "trained_tokens": step.trained_tokens,
            "sampled_tokens": step.sampled_tokens,
            "microbatches": step.microbatches,
            "decode_rows": step.rows,
        },
        "assumed": dataclasses.asdict(found.assumed),
    }


def _lines(found: Plan) -> Iterator[str]:
    site, chip = found.site, found.site.chip
    chips = f"{len(site.devices)} × {chip.name}"
    yield f"{site.name}: {chips}, {site.host_chips} on each of {site.num_hosts} host(s)"
    yield f"learner on {_mesh(found.meshes.learner)}, {_execution(found)}"
    replicas = f"{site.num_hosts} replicas, each" if site.num_hosts > 1 else "one replica"
    yield f"sampler: {replicas} on {_mesh(found.meshes.sampler)}"
    yield ""
    if found.memory is not None:
        yield from _memory_lines(found.memory, chip.memory)
        yield ""
    yield from _step_lines(found)


def _mesh(mesh: Any) -> str:
    sizes = [f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1]
    return " × ".join(sizes) or "one chip"


def _execution(found: Plan) -> str:
    execution = found.meshes.execution
    return (
        f"{execution.layers} layers, {execution.compute_dtype} on {execution.param_dtype} weights, "
        f"attention {execution.attention}, experts {execution.experts}, remat {execution.remat}"
    )


def _memory_lines(memory: Memory, limit: int) -> Iterator[str]:
    """A column for each phase."""
    small = memory.worst.total < GIB
    unit, scale = ("MiB", 2**20) if small else ("GiB", GIB)

    def shown(size: int | None) -> str:
        return "-" if size is None else f"{size / scale:.2f}"

    rows = [[f"{unit} of a chip", *(phase.name for phase in memory.phases)]]
    for purpose in PURPOSES:
        cells = [phase.parts.get(purpose) for phase in memory.phases]
        if any(cells):
            rows.append([purpose, *map(shown, cells)])
    rows.append(["together", *(shown(phase.total) for phase in memory.phases)])
    spare = [f"{1 - phase.total / limit:.0%}" for phase in memory.phases]
    rows.append([f"to spare of {limit / GIB:.1f} GiB", *spare])
    yield from _table(rows)
    if memory.host_bytes:
        yield f"in the memory of each host: {memory.host_bytes / GIB:.1f} GiB"


def _step_lines(found: Plan) -> Iterator[str]:
    step, assumed, chip = found.step, found.assumed, found.site.chip
    rows = [["a step, in the mean of a cycle", "seconds at peak", "bound by", "TFLOP"]]
    for time in step.times:
        rows.append([time.name, f"{time.seconds:.3g}", time.bound, f"{time.flops / 1e12:,.3g}"])
    rows.append(["together", f"{step.seconds:.3g}", "", ""])
    yield from _table(rows)
    expected = step.seconds / assumed.utilisation
    peak = chip.flops_per_s * len(found.site.devices)
    yield (
        f"expected: {expected:.3g} s a step, {step.sampled_tokens / expected:,.0f} sampled and "
        f"{step.trained_tokens / expected:,.0f} trained tokens a second; the update's model FLOPs "
        f"are {step.model_flops / 1e12:,.3g} TFLOP, {step.model_flops / peak / expected:.1%} of "
        "what the chips could do in that time"
    )
    yield ""
    yield "That assumes"
    link = chip.link_bytes_per_s
    links = "links not known" if link is None else f"{link / 1e9:,.0f} GB/s of links"
    yield (
        f"  {chip.flops_per_s / 1e12:,.3g} TFLOP/s, {chip.bytes_per_s / 1e9:,.0f} GB/s of memory "
        f"and {links} for each chip, and {assumed.utilisation:.0%} of them reached"
    )
    yield (
        f"  episodes of {assumed.episode_tokens:,} tokens, {assumed.sampled_share:.0%} of them "
        f"sampled; designs and hints of {assumed.design_share:.0%} of their longest, one attempt "
        "each"
    )
    yield (
        f"  {step.trained_tokens:,.0f} tokens trained a step, in {step.microbatches} "
        f"microbatch(es) that are {PACKING:.0%} full; {step.sampled_tokens:,.0f} sampled, "
        f"{step.rows} rows at once on each host"
    )
    yield "  no time for environments, the longest episode, collectives within a layer, the host"


def _table(rows: list[list[str]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        first, *rest = row
        cells = (f"{cell:>{width}}" for cell, width in zip(rest, widths[1:], strict=True))
        yield "  ".join([f"{first:<{widths[0]}}", *cells]).rstrip()
