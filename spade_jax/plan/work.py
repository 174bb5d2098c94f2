"""What a step computes, reads and sends, counted by formula, and how long that takes at least.

The time of a phase is the longest of three: its products at the chips' peak, what it reads from
memory at the peak bandwidth, and what it sends at the peak of the links. That is a bound and no
forecast. The forecast divides it by one stated utilisation. Not counted: the environments' own
time, waiting for the longest episode, collectives within a layer, moves to and from host memory.

    forward of a token    2 * active parameters + 4 * heads * head_dim * keys seen * layers
    score of a token      2 * embed * vocabulary, where it is sampled or has a loss
    update                3 forwards, and a 4th where activations are computed again
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from models import transformer
from models.config import TransformerConfig
from spade_jax.config import Config
from spade_jax.learner import lora
from spade_jax.plan.programs import Meshes
from spade_jax.plan.topology import Site

WORD_TOKENS = 1.4  # of English text
PACKING = 0.9  # share of computed tokens that are not padding
ADAM_BYTES = 20  # of a float32 weight: it and its gradient twice, to clip, and written once


@dataclass(frozen=True)
class Assumed:
    """What no configuration says."""

    episode_tokens: int  # mean length of an episode
    sampled_share: float = 0.5  # of an episode's tokens; the others are prompts and observations
    design_share: float = 0.5  # of the longest completion that a design or a hint may have
    utilisation: float = 0.4  # of the peak rates


def default_episode(config: Config) -> int:
    """A quarter of the longest."""
    return config.engine.context_tokens // 4


class Model(NamedTuple):
    """Sizes that costs are made of."""

    shared: int  # parameters of all layers that every token uses
    experts: int  # and of all experts
    active: float  # parameters of all layers that one token uses
    head: int
    attention: int  # FLOPs for each key that a token sees
    kv_bytes: int  # of a token in the cache
    total: int

    @classmethod
    def of(cls, config: TransformerConfig, compute_dtype: str) -> "Model":
        heads, kv_heads = config.num_heads, config.num_kv_heads
        attention = 2 * config.embed * config.head_dim * (heads + kv_heads)
        router = config.embed * config.num_experts if config.num_experts > 1 else 0
        expert = 3 * config.embed * config.mlp
        layers, head = config.num_layers, config.embed * config.vocab_size
        shared, experts = layers * (attention + router), layers * expert * config.num_experts
        itemsize = jnp.dtype(compute_dtype).itemsize
        return cls(
            shared,
            experts,
            shared + layers * expert * config.experts_per_token,
            head,
            4 * heads * config.head_dim * layers,
            2 * kv_heads * config.head_dim * layers * itemsize,
            shared + experts + head * (1 if config.tied_head else 2),
        )

    def forward(self, tokens: float, keys: float, scored: float) -> float:
        """FLOPs of tokens that see so many keys each in the mean."""
        return tokens * (2 * self.active + self.attention * keys) + 2 * scored * self.head

    def read(self, rows: float, chosen_share: float) -> float:
        """Parameters that a call reads: of the experts, those that any of its rows takes."""
        return self.shared + self.head + self.experts * (1 - (1 - chosen_share) ** rows)


class Cost(NamedTuple):
    """Totals over the chips that share the work."""

    flops: float = 0.0
    read_bytes: float = 0.0
    link_bytes: float = 0.0

    def plus(self, other: "Cost") -> "Cost":
        return Cost(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, count: float) -> "Cost":
        return Cost(*(count * value for value in self))


class Time(NamedTuple):
    """One phase of a step, in the mean over a cycle."""

    name: str
    seconds: float  # at the peak rates
    bound: str  # compute, memory or links
    flops: float  # of all chips


@dataclass(frozen=True)
class Step:
    """A whole step."""

    times: list[Time]
    trained_tokens: float
    sampled_tokens: float
    model_flops: float  # of the update, without what is computed again or is padding
    microbatches: int
    rows: int  # that decode together on a host while episodes are played

    @property
    def seconds(self) -> float:
        return sum(time.seconds for time in self.times)


def count(config: Config, site: Site, meshes: Meshes, assumed: Assumed) -> Step:
    """Count one step, with a share of what happens once a cycle."""
    model = Model.of(config.model, meshes.execution.compute_dtype)
    counter = _Counter(config, site, meshes, model, assumed)
    designer, agent, cycle = config.designer, config.agent, config.run.cycle_steps
    plays = designer.designs * agent.seeds * agent.plays
    hinted = plays / cycle if config.reward.needs_regret else 0.0
    length, sampled = assumed.episode_tokens, assumed.sampled_share * assumed.episode_tokens
    designs = designer.designs / cycle if designer.source == "policy" else 0.0
    prompt = designer.document_words * WORD_TOKENS
    written = assumed.design_share * designer.max_tokens
    hints = assumed.design_share * config.hint.max_tokens if config.reward.needs_regret else 0.0
    times = []
    if designs:
        once = counter.sampling(designer.designs, prompt, written)
        once = _sum(once, counter.sampling(designer.designs, written, hints))
        times.append(counter.time("design", once, meshes.sampler.size, 1 / cycle))
    play = counter.sampling(plays + hinted, length - sampled, sampled)
    times.append(counter.time("play", play, meshes.sampler.size))
    designed = designs * (prompt + written) if designer.train else 0.0
    tokens = plays * length + designed
    scored = plays * sampled + (designs * written if designer.train else 0.0)
    microbatches, update, again = counter.update(tokens, scored)
    chips = len(site.devices)
    if again.flops:
        times.append(counter.time("log-probabilities", [again], chips))
    times.append(counter.time("gradient", [update], chips))
    times.append(counter.time("optimiser", [counter.optimiser()], chips))
    if site.chip.link_bytes_per_s:
        times.append(counter.time("weight move", [counter.move()], meshes.sampler.size))
    true = 3 * model.forward(tokens, length / 2, scored) * config.learner.epochs
    made = plays * sampled + hinted * sampled + designs * (written + hints)
    return Step(times, tokens, made, true, microbatches, counter.rows(plays + hinted))


def _sum(*parts: list[Cost]) -> list[Cost]:
    return [cost for part in parts for cost in part]


@dataclass(frozen=True)
class _Counter:
    """Counts the phases of one configuration."""

    config: Config
    site: Site
    meshes: Meshes
    model: Model
    assumed: Assumed

    def rows(self, sequences: float) -> int:
        """Rows of a decode step on one host."""
        mine = max(-(-int(sequences) // self.site.num_hosts), 1)
        return min(self.config.engine.slots, mine)

    def sampling(self, sequences: float, prompt: float, sampled: float) -> list[Cost]:
        """What one host does for its share of sequences: prefill, then every decode step."""
        mine, rows = sequences / self.site.num_hosts, self.rows(sequences)
        model, chosen = self.model, self.config.model
        share = chosen.experts_per_token / chosen.num_experts
        itemsize = jnp.dtype(self.meshes.execution.compute_dtype).itemsize
        call = self.config.engine.prefill_tokens
        calls = mine * prompt / call
        prefill = Cost(
            model.forward(mine * prompt, prompt / 2, mine),
            calls * itemsize * model.read(call, share),
        )
        context = prompt + sampled / 2
        step = Cost(
            model.forward(rows, context, rows),
            itemsize * model.read(rows, share) + rows * context * model.kv_bytes,
        )
        return [prefill, step.times(mine * sampled / rows)]

    def update(self, tokens: float, scored: float) -> tuple[int, Cost, Cost]:
        """Microbatches of one pass over the rollout; the gradient's cost and that of the
        log-probabilities before it.
        """
        config, model = self.config, self.model
        shape, settings = self.meshes.learner.shape, config.learner
        shards = shape["data"] * shape["fsdp"] * shape["expert"]
        rows = -(-int(tokens / PACKING) // config.batch.row_tokens)
        each = -(-rows // settings.minibatches)
        microbatches = settings.minibatches * -(-each // (shards * config.batch.device_rows))
        computed = microbatches * shards * config.batch.device_rows * config.batch.row_tokens
        # Kernels of accelerators compute a row's whole triangle, whatever segments it has.
        whole = self.meshes.execution.attention != "xla"
        keys = (config.batch.row_tokens if whole else self.assumed.episode_tokens) / 2
        forward = model.forward(computed, keys, scored)
        passes = 3 if self.meshes.execution.remat == "none" else 4
        # Every pass gathers the weights that fsdp splits, and the gradient is scattered.
        own = 2 * model.total / (shape["expert"] * shape["tensor"])
        gathered = own * (1 - 1 / shape["fsdp"]) * microbatches * len(self.site.devices)
        gradient = Cost(passes * forward, 0.0, passes * gathered)
        before = (settings.kl_coef > 0) + (settings.rollout_steps > 1)
        again = Cost(forward, 0.0, gathered).times(before)
        return microbatches, gradient.times(settings.epochs), again

    def optimiser(self) -> Cost:
        """Reading and writing weights, gradients and moments."""
        settings = self.config.learner
        moment = 2 * jnp.dtype(settings.moments_dtype).itemsize  # read and written
        copies = self.meshes.learner.shape["data"]
        params = transformer.abstract_params(self.config.model, self.meshes.execution)
        if settings.lora_rank:
            params = lora.abstract_adapters(params, settings)
        trained = sum(leaf.size for leaf in jax.tree.leaves(params)) * copies
        return Cost(0.0, trained * (ADAM_BYTES + 2 * moment)).times(settings.rollout_steps)

    def move(self) -> Cost:
        """What the chips of one host receive."""
        itemsize = jnp.dtype(self.meshes.execution.compute_dtype).itemsize
        return Cost(0.0, 0.0, itemsize * self.model.total)

    def time(self, name: str, costs: list[Cost], chips: int, share: float = 1.0) -> Time:
        """The least time that `chips` need for work one after the other."""
        chip, total = self.site.chip, 0.0
        by_bound: dict[str, float] = {}
        for cost in costs:
            limits: Mapping[str, float] = {
                "compute": cost.flops / chip.flops_per_s,
                "memory": cost.read_bytes / chip.bytes_per_s,
                "links": cost.link_bytes / (chip.link_bytes_per_s or float("inf")),
            }
            bound = max(limits, key=lambda kind: limits[kind])
            total += limits[bound] / chips
            by_bound[bound] = by_bound.get(bound, 0.0) + limits[bound]
        flops = sum(cost.flops for cost in costs) * share
        if chips < len(self.site.devices):
            flops *= self.site.num_hosts  # the other hosts do as much
        return Time(name, total * share, max(by_bound, key=lambda kind: by_bound[kind]), flops)
