"""The counts of a step, by hand."""

import dataclasses
from types import SimpleNamespace

import jax
import pytest

from models import transformer
from models.config import TransformerConfig
from models.execution import PLAIN, Execution
from models.sharding import build_mesh
from spade_jax.config import AgentConfig, BatchConfig, Config, DesignerConfig, EngineConfig
from spade_jax.plan import work
from spade_jax.plan.programs import Meshes
from spade_jax.plan.topology import Chip, Site
from spade_jax.recipes import QWEN3_4B, QWEN3_8B, QWEN3_30B_A3B, change

DENSE = TransformerConfig(
    vocab_size=100,
    num_layers=3,
    embed=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    mlp=10,
    num_experts=1,
    experts_per_token=1,
)
CHIP = Chip("a chip", 1e6, 1e5, 1e4, 2**30)


@pytest.mark.parametrize(
    "config",
    [DENSE, QWEN3_4B.model, QWEN3_8B.model, QWEN3_30B_A3B.model],
    ids=["dense", "4b", "8b", "30b-a3b"],
)
def test_parameters_are_those_of_the_model_but_for_its_norms(config: TransformerConfig):
    params = transformer.abstract_params(config)
    matrices = sum(leaf.size for leaf in jax.tree.leaves(params) if leaf.ndim > 1)
    assert work.Model.of(config, "float32").total == matrices


def test_a_token_uses_its_own_experts():
    sparse = dataclasses.replace(DENSE, num_experts=8, experts_per_token=2)
    model = work.Model.of(sparse, "bfloat16")
    expert, attention, router = 3 * 16 * 10, 2 * 16 * 4 * (4 + 2), 16 * 8
    assert model.active == 3 * (attention + router + 2 * expert)
    assert model.kv_bytes == 2 * 2 * 4 * 3 * 2  # keys and values, heads, dim, layers, bytes
    # Of one row two experts are read, of many nearly all.
    fixed = 3 * (attention + router) + 1600
    assert model.read(1, 2 / 8) == pytest.approx(fixed + 3 * 2 * expert)
    assert model.read(100, 2 / 8) == pytest.approx(fixed + 3 * 8 * expert)


def test_the_forward_counts_products_keys_and_scores():
    model = work.Model.of(DENSE, "float32")
    layer = 2 * 16 * 4 * (4 + 2) + 3 * 16 * 10
    expected = 7 * (2 * 3 * layer + 4 * 4 * 4 * 3 * 5) + 2 * 2 * 1600
    assert model.forward(7, 5, 2) == expected


def site(hosts: int, chips: int) -> Site:
    devices = [SimpleNamespace(process_index=index // chips) for index in range(hosts * chips)]
    return Site("stand-in", CHIP, devices)


def counted(
    config: Config, execution: Execution = PLAIN, hosts: int = 1, episode: int = 64
) -> work.Step:
    mesh = build_mesh(1, 1, 1, 1, devices=jax.devices()[:1])
    meshes = Meshes(mesh, mesh, [], execution)
    return work.count(config, site(hosts, 1), meshes, work.Assumed(episode))


def config() -> Config:
    return Config(
        model=DENSE,
        engine=EngineConfig(slots=8, context_tokens=256),
        batch=BatchConfig(row_tokens=256, device_tokens=256),
        designer=DesignerConfig(designs=4, skills_per_cycle=2, max_tokens=200, delay_steps=0),
        agent=AgentConfig(seeds=2, plays=3, max_tokens=64),
    )


def test_the_update_counts_what_is_computed():
    """24 plays of 64 tokens and a fourth of 4 designs, of 56 and 100 tokens, in rows of 256."""
    step = counted(config())
    assert step.trained_tokens == 24 * 64 + 156
    assert step.microbatches == 8  # 1,692 tokens at 90% are 1,880, and a row is 256
    model = work.Model.of(DENSE, "float32")
    (gradient,) = [time for time in step.times if time.name == "gradient"]
    scored = 24 * 32 + 100
    # The whole of every microbatch; without a kernel only a segment's own keys.
    assert gradient.flops == 3 * model.forward(8 * 256, 32, scored)
    assert gradient.bound == "compute"
    assert gradient.seconds == pytest.approx(gradient.flops / 1e6)
    again = counted(config(), dataclasses.replace(PLAIN, remat="full"))
    (computed_again,) = [time for time in again.times if time.name == "gradient"]
    assert computed_again.flops == pytest.approx(gradient.flops * 4 / 3)


def test_a_second_pass_costs_a_second_gradient_and_the_old_logprobs():
    once, twice = counted(config()), counted(change(config(), learner={"epochs": 2}))
    names = [time.name for time in twice.times]
    assert "log-probabilities" in names
    assert "log-probabilities" not in [time.name for time in once.times]
    for name, factor in (("gradient", 2), ("optimiser", 2), ("play", 1)):
        seconds = [
            next(time.seconds for time in step.times if time.name == name) for step in (once, twice)
        ]
        assert seconds[1] == pytest.approx(factor * seconds[0])


def test_hosts_share_the_plays_but_a_step_of_decoding_stays_as_long():
    one, four = counted(config(), hosts=1), counted(config(), hosts=4)
    assert (one.rows, four.rows) == (8, 8)  # 30 plays: 24, and a fourth of 24 with the hint
    many = counted(config(), hosts=30)
    assert many.rows == 1
    play = [next(time for time in step.times if time.name == "play") for step in (one, four)]
    assert play[0].seconds == pytest.approx(4 * play[1].seconds)
    assert play[0].flops == pytest.approx(play[1].flops)  # of all hosts together


def test_the_longest_of_compute_memory_and_links_is_the_time():
    mesh = build_mesh(1, 1, 1, 1, devices=jax.devices()[:1])
    model = work.Model.of(DENSE, "float32")
    meshes = Meshes(mesh, mesh, [], PLAIN)
    counter = work._Counter(config(), site(1, 2), meshes, model, work.Assumed(64))
    for cost, bound in (
        (work.Cost(4e6, 1e5, 1e4), "compute"),
        (work.Cost(1e6, 4e5, 1e4), "memory"),
        (work.Cost(1e6, 1e5, 4e4), "links"),
    ):
        time = counter.time("x", [cost], 2)
        assert (time.seconds, time.bound) == (2.0, bound)
