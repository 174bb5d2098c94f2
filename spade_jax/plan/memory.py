"""What a chip holds in each phase of a step, by purpose, and the setting to change where that is
too much.

The phases take turns (design decision 4): while the sampler works, its copy of the weights and its
pages lie beside the learner's weights and moments; before the update they are gone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax

from spade_jax.config import Config
from spade_jax.learner.step import Learner, TrainState
from spade_jax.plan.programs import Compiled, Meshes, size
from spade_jax.plan.topology import GIB, Site
from spade_jax.rollout import weights

SPARE = 0.08  # of a chip's memory that a plan has to leave

PURPOSES = (
    "weights",
    "optimiser",
    "reference",
    "gradients",
    "sampler's copy",
    "KV pages",
    "temporaries",
    "programs",
)
"""Temporaries are activations above all, with the batch and the padding of layouts."""


@dataclass(frozen=True)
class Phase:
    """The most that a chip holds in one phase, in bytes by purpose."""

    name: str
    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Memory:
    """All phases, and what is kept in the memory of each host meanwhile."""

    phases: list[Phase]
    host_bytes: int

    @property
    def worst(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.total)


def account(config: Config, site: Site, meshes: Meshes, found: Sequence[Compiled]) -> Memory:
    """Add up each phase from what its programs hold and what lies beside them."""
    learner = Learner(config.model, config.learner, meshes.learner, meshes.execution)
    state, settings = learner.abstract_state(), config.learner
    weights_size, adapters = size(state.params), size(state.adapters)
    moments, reference = size(state.opt_state), _reference(config, state)
    trained = adapters or weights_size
    on_chip = {
        "weights": weights_size + adapters,
        "optimiser": moments if settings.optimizer_memory == "device" else 0,
        "reference": reference if settings.reference_memory == "device" else 0,
        "programs": sum(program.code for program in found),
    }

    def phase(name: str, **parts: int) -> Phase:
        values = on_chip | {_PARTS.get(part, part): value for part, value in parts.items()}
        return Phase(
            name, {purpose: values[purpose] for purpose in PURPOSES if values.get(purpose)}
        )

    sampler = _Sampler(config, meshes, state, found)
    phases = [
        phase("sampling", copy=sampler.copy, pages=sampler.pages, temporaries=sampler.work),
        phase("weight move", copy=sampler.copy, temporaries=sampler.moved),
    ]
    if scored := _largest(found, "logprobs"):
        rest = scored.total - weights_size
        phases.append(phase("log-probabilities", reference=reference, temporaries=rest))
    gradient, applied = _largest(found, "gradient"), _largest(found, "apply")
    assert gradient is not None and applied is not None, "every update has them"
    rest = gradient.total - weights_size - adapters - trained
    phases.append(phase("gradient", gradients=trained, temporaries=rest))
    rest = applied.total - moments - 2 * trained
    phases.append(phase("optimiser", optimiser=moments, gradients=trained, temporaries=rest))
    host = moments if settings.optimizer_memory == "host" else 0
    host += reference if settings.reference_memory == "host" else 0
    return Memory(phases, host * site.host_chips)


_PARTS = {"copy": "sampler's copy", "pages": "KV pages"}


class _Sampler:
    """What the sampler's programs hold; nothing where it samples with the learner's own arrays."""

    def __init__(
        self, config: Config, meshes: Meshes, state: TrainState, found: Sequence[Compiled]
    ) -> None:
        own = [program for program in found if program.part == "sampler"]
        allocated, decode = _largest(own, "allocate"), _largest(own, "decode")
        moved = _largest(found, "weight move")
        assert allocated and decode and moved, "every run has them"
        self.pages = allocated.outputs
        self.work = max(p.outputs + p.temporaries for p in own if p is not allocated)
        shared = _shared(config, meshes, state)
        self.copy = 0 if shared else decode.arguments - allocated.outputs
        self.moved = 0 if shared else moved.temporaries
        if state.adapters is not None:  # merged into a copy first
            self.moved += size(state.params)


def _shared(config: Config, meshes: Meshes, state: TrainState) -> bool:
    """Whether the sampler needs no arrays of its own: see `rollout.weights`."""
    if state.adapters is not None or meshes.sampler is not meshes.learner:
        return False
    if config.engine.weights != "same":
        return False
    own = weights.abstract_params(config.model, meshes.execution)
    pairs = zip(jax.tree.leaves(own), jax.tree.leaves(state.params), strict=True)
    return all(left.dtype == right.dtype for left, right in pairs)


def _reference(config: Config, state: TrainState) -> int:
    """Bytes of the frozen starting weights, where a copy of them is kept."""
    needed = bool(config.learner.kl_coef) or config.designer.policy == "initial"
    return size(state.params) if needed and not config.learner.lora_rank else 0


def _largest(found: Sequence[Compiled], name: str) -> Compiled | None:
    """The program of that name, the largest where it has several shapes."""
    named = [program for program in found if program.name.partition("[")[0] == name]
    return max(named, key=lambda program: program.total, default=None)


def refusal(config: Config, site: Site, found: Sequence[Compiled], memory: Memory | None) -> str:
    """Why the plan is refused, and which setting to change; empty if it fits."""
    for program in found:
        if program.too_large:
            phase = Phase("sampling" if program.part == "sampler" else "gradient", {})
            return (
                f"the program {program.name} does not compile for {site.chip.name}: "
                f"{program.too_large}; {_knob(config, site, phase, 0)}"
            )
    if memory is None:
        return ""
    limit = site.chip.memory
    worst, most = memory.worst, int((1 - SPARE) * limit)
    if worst.total <= most:
        return ""
    return (
        f"{worst.name} takes {worst.total / GIB:.1f} GiB of a chip, and {SPARE:.0%} less than its "
        f"{limit / GIB:.1f} GiB are {most / GIB:.1f}; "
        f"{_knob(config, site, worst, worst.total - most)}"
    )


def _knob(config: Config, site: Site, phase: Phase, excess: int) -> str:
    """The first setting that helps in a phase which is over by `excess` bytes."""
    engine, learner, batch = config.engine, config.learner, config.batch
    held = phase.parts.get
    pages = held("KV pages", 0)
    if pages > excess:
        kv_tokens = engine.num_pages * engine.page_tokens
        fitting = int(kv_tokens * (1 - excess / pages)) // engine.page_tokens * engine.page_tokens
        if fitting >= engine.context_tokens:
            return f"lower engine.kv_tokens={kv_tokens} to {fitting}"
    if phase.name == "gradient":
        if batch.device_rows > 1:
            return (
                f"lower batch.device_tokens={batch.device_tokens}, to {batch.row_tokens} at least"
            )
        if config.execution.remat not in ("auto", "full"):
            return f"set execution.remat={config.execution.remat} to full"
    if phase.name != "optimiser" and held("optimiser", 0) > excess:
        return "set learner.optimizer_memory to host"
    if phase.name != "log-probabilities" and held("reference", 0) > excess:
        return "set learner.reference_memory to host"
    if phase.name == "optimiser" and learner.moments_dtype == "float32":
        return "set learner.moments_dtype to bfloat16"
    if phase.name == "gradient" and 2 * config.mesh.tensor <= site.host_chips:
        return f"raise mesh.tensor={config.mesh.tensor} to {2 * config.mesh.tensor}"
    return "take a topology of more chips"
