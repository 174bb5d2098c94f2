"""Every program of a run, lowered from the run's own functions and compiled, one after the other.

The sampler's are those of `rollout.programs` on the devices of one host, the update's those of
`learner.step` on all of them; both get shapes and no arrays. What a program holds is the compiler's
account, padding of its layouts included. A program that the compiler itself finds too large is kept
as that, since nothing later can be said of it.
"""

import dataclasses
import functools
import gc
import logging
import math
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from models import backends, transformer
from models.execution import Execution
from models.sharding import build_mesh, host_mesh, param_shardings
from spade_jax.config import Config
from spade_jax.learner.batch import Rows, empty
from spade_jax.learner.packing import TAIL_PARTS
from spade_jax.learner.step import Learner
from spade_jax.plan.topology import Site, standing_in
from spade_jax.rollout import weights
from spade_jax.rollout.programs import Programs
from spade_jax.rollout.spread import spreader

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Compiled:
    """What one executable holds on a chip, in bytes."""

    part: str  # sampler, move or learner
    name: str
    arguments: int
    outputs: int  # besides what is updated in place
    temporaries: int
    code: int
    seconds: float  # of processor time, to trace and compile
    too_large: str = ""  # what the compiler said, if it refused; the sizes are 0 then

    @property
    def total(self) -> int:
        """With its arguments, and without its code."""
        return self.arguments + self.outputs + self.temporaries


@dataclass(frozen=True)
class Meshes:
    """How learner and sampler lie on the devices of a site."""

    learner: Mesh
    sampler: Mesh  # of one host, to compile for
    samplers: list[Mesh]  # of every host; none where there is one, whose mesh is the learner's
    execution: Execution


def lay_out(config: Config, site: Site) -> Meshes:
    """Arrange the devices as the run would.

    Raises:
        ModelError: the sizes of `mesh` do not suit the devices, or the model the sizes.
    """
    learner = build_mesh(**dataclasses.asdict(config.mesh), devices=site.devices)
    execution = backends.resolve(config.execution, config.model, site.devices[0])
    param_shardings(config.model, learner, execution)  # refuses what does not divide
    if site.num_hosts == 1:
        return Meshes(learner, learner, [], execution)
    samplers = [host_mesh(config.model, devices) for devices in site.hosts]
    sampler = host_mesh(config.model, list(site.apart)) if site.apart else samplers[0]
    return Meshes(learner, sampler, samplers, execution)


def compile_all(config: Config, site: Site, meshes: Meshes) -> list[Compiled]:
    """Compile what the run needs, one program at a time: the compiler's memory is freed between."""
    found = []
    with standing_in(site.devices):
        for part, name, lower in _lowerers(config, site, meshes):
            started = time.process_time()
            found.append(_compile(part, name, lower(), started))
            logger.info("%s", describe(found[-1]))
            gc.collect()
    return found


def describe(program: Compiled) -> str:
    """One line on a program."""
    if program.too_large:
        return f"{program.name}: too large for the chip"
    sizes = {
        "arguments": program.arguments,
        "temporaries": program.temporaries + program.outputs,
        "code": program.code,
    }
    text = ", ".join(f"{name} {size / 2**20:,.1f} MiB" for name, size in sizes.items())
    return f"{program.name}: {text}; compiled in {program.seconds:.0f} s of processor time"


def _compile(part: str, name: str, lowered: jax.stages.Lowered, started: float) -> Compiled:
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        text = str(error)
        if "RESOURCE_EXHAUSTED" not in text:
            raise
        used = re.search(r"Used [\d.]+[KMG] of [\d.]+[KMG] hbm", text)
        said = used[0] if used else text.strip().splitlines()[0]
        return Compiled(part, name, 0, 0, 0, 0, time.process_time() - started, said)
    seconds = time.process_time() - started
    memory = compiled.memory_analysis()
    assert memory is not None, "every compiler that is asked here gives an account"
    return Compiled(
        part,
        name,
        memory.argument_size_in_bytes,
        memory.output_size_in_bytes - memory.alias_size_in_bytes,
        memory.temp_size_in_bytes,
        memory.generated_code_size_in_bytes,
        seconds,
    )


def _lowerers(
    config: Config, site: Site, meshes: Meshes
) -> Iterator[tuple[str, str, Callable[[], jax.stages.Lowered]]]:
    """Name each program after its part, with what traces it."""
    execution = meshes.execution
    engine = Programs(config.model, config.engine, meshes.sampler, execution)
    for program in engine.names():
        name = program.kind if not program.pieces else f"{program.kind}[{program.pieces}]"
        yield "sampler", name, lambda program=program: engine.lower(program)
    yield "move", "weight move", lambda: _lower_move(config, site, meshes)
    learner = Learner(config.model, config.learner, meshes.learner, execution)
    most = config.batch.device_rows
    for rows in microbatch_rows(config):
        shapes = row_shapes(config, learner.shards * rows)
        for name, lower in learner.programs(shapes).items():
            if rows == most:
                yield "learner", name, lower
            elif name in ("gradient", "logprobs"):  # the others do not depend on it
                yield "learner", f"{name}[{rows}]", lower


def microbatch_rows(config: Config) -> list[int]:
    """Rows of one device in a microbatch: all, and what the last one is rounded up to."""
    most = config.batch.device_rows
    return sorted({most, -(-most // TAIL_PARTS)}, reverse=True)


def row_shapes(config: Config, rows: int) -> Rows:
    """Shapes of a microbatch as an update meets it."""
    model, learner = config.model, config.learner
    routing = (model.num_layers, model.experts_per_token) if learner.router_replay else None
    one = empty((1, config.batch.row_tokens), routing)
    if learner.kl_coef:
        one = one._replace(reference_logprobs=one.weights)
    if learner.rollout_steps > 1:
        one = one._replace(old_logprobs=one.weights)
    return jax.tree.map(
        lambda array: jax.ShapeDtypeStruct((rows, *array.shape[1:]), array.dtype), one
    )


def _lower_move(config: Config, site: Site, meshes: Meshes) -> jax.stages.Lowered:
    """Trace the move of the weights from the learner to the samplers of all hosts."""
    execution, form = meshes.execution, config.engine.weights
    layers = config.model, execution
    if meshes.samplers:
        shapes = weights.abstract_params(*layers, form)
        if form == "same":  # rounded on the way
            shapes = transformer.abstract_params(*layers)
        moved = weights.moves(*layers, meshes.learner, meshes.sampler, form)
        move = spreader(meshes.learner, tuple(meshes.samplers), moved)
        return move.lower(jax.tree.leaves(shapes))  # type: ignore[attr-defined]
    return jax.jit(
        functools.partial(weights.rounded, execution=execution, form=form),
        in_shardings=(param_shardings(config.model, meshes.learner, execution),),
        out_shardings=weights.shardings(config.model, meshes.sampler, execution, form),
    ).lower(transformer.abstract_params(*layers))


def size(tree: Any) -> int:
    """Bytes of one chip's part of arrays that are shapes with shardings, padding not counted."""
    return sum(
        leaf.dtype.itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape))
        for leaf in jax.tree.leaves(tree)
    )
