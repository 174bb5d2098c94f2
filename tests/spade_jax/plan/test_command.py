"""A plan of `configs/micro.py` for this machine, with a model and engine that compile quickly."""

import dataclasses
import json
from pathlib import Path

import jax
import pytest

from models.config import TransformerConfig
from spade_jax import cli
from spade_jax.cli import load_config
from spade_jax.config import Config
from spade_jax.plan import command, memory
from spade_jax.plan.command import Plan, make_plan
from spade_jax.plan.programs import Compiled, microbatch_rows, row_shapes
from spade_jax.plan.topology import Chip, Site
from spade_jax.recipes import change

MICRO = Path(__file__).resolve().parents[3] / "configs" / "micro.py"
GIB = 2**30
OVERRIDES = {
    "engine": {"slots": 8, "queue": 0, "prefill_tokens": 64, "context_tokens": 704},
    "batch": {"row_tokens": 704, "device_tokens": 704},
}


def small(config: Config) -> Config:
    model = TransformerConfig(
        vocab_size=64,
        num_layers=1,
        embed=16,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        mlp=16,
        num_experts=1,
        experts_per_token=1,
    )
    return dataclasses.replace(change(config, **OVERRIDES), model=model)


def one_device(room: int = GIB) -> Site:
    return Site("local", Chip("a chip", 1e9, 1e9, None, room), jax.devices()[:1])


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(small(load_config(MICRO)), one_device(), None, 0.4)


def test_every_program_of_the_run_is_compiled(plan: Plan):
    names = {program.name: program for program in plan.programs}
    sampler = {"allocate", "place", "copy", "prefill[2]", "decode"}
    learner = {"zeros", "gradient", "norm", "apply"}
    assert set(names) == sampler | learner | {"weight move"}
    assert not any(program.too_large for program in plan.programs)
    held = {name: names[name].arguments for name in ("decode", "gradient", "apply")}
    assert min(held.values()) > 0 and names["gradient"].temporaries > 0


def test_memory_is_told_by_phase_and_purpose(plan: Plan):
    """On one device the sampler holds the learner's own arrays, in float32."""
    assert plan.memory is not None and not plan.refusal
    phases = {phase.name: phase.parts for phase in plan.memory.phases}
    params = 4 * (2 * 64 * 16 // 2 + 16 * 8 * 6 + 3 * 16 * 16 + 3 * 16)
    for parts in phases.values():
        assert parts["weights"] == params
        assert parts["optimiser"] == pytest.approx(2 * params, abs=64)  # and two counters
        assert "sampler's copy" not in parts
    cache = 2 * 8 * 704 * 8 * 4  # keys and values, slots, tokens, a head, bytes
    assert phases["sampling"]["KV pages"] == pytest.approx(cache, rel=0.05)
    assert phases["gradient"]["gradients"] == params
    assert phases["gradient"]["temporaries"] > 704 * 16 * 4
    assert plan.memory.worst.total == max(phase.total for phase in plan.memory.phases)


def test_a_sampler_that_rounds_has_a_copy(plan: Plan):
    bf16 = dataclasses.replace(plan.meshes.execution, compute_dtype="bfloat16")
    rounded = dataclasses.replace(plan.meshes, execution=bf16)
    assert plan.memory is not None
    found = memory.account(plan.config, plan.site, rounded, plan.programs)
    held = {program.name: program for program in plan.programs}
    copy = held["decode"].arguments - held["allocate"].outputs
    assert found.phases[0].parts["sampler's copy"] == copy > 0
    assert found.phases[0].total == plan.memory.phases[0].total + copy


def test_settings_of_the_optimiser_move_its_memory(plan: Plan):
    assert plan.memory is not None
    full = plan.memory.phases[0].parts["optimiser"]
    moments = change(plan.config, learner={"moments_dtype": "bfloat16"})
    halved = memory.account(moments, plan.site, plan.meshes, plan.programs)
    assert halved.phases[0].parts["optimiser"] == pytest.approx(full / 2, abs=64)
    away = change(plan.config, learner={"optimizer_memory": "host", "kl_coef": 0.1})
    found = memory.account(away, plan.site, plan.meshes, plan.programs)
    assert "optimiser" not in found.phases[0].parts and found.host_bytes == full
    assert found.phases[0].parts["reference"] == found.phases[0].parts["weights"]
    assert found.phases[-1].parts["optimiser"] == full  # while it is used


@pytest.mark.parametrize(
    ("changes", "phase", "knob"),
    [
        ({}, "gradient", "take a topology of more chips"),
        ({"batch": {"device_tokens": 1408}}, "gradient", "lower batch.device_tokens=1408, to 704"),
        ({"execution": {"remat": "dots"}}, "gradient", "set execution.remat=dots to full"),
        ({}, "optimiser", "set learner.moments_dtype to bfloat16"),
        ({}, "sampling", "lower engine.kv_tokens=5632 to "),
        ({"engine": {"kv_tokens": 704}}, "sampling", "set learner.optimizer_memory to host"),
        ({"engine": {"kv_tokens": 704}}, "log-probabilities", "learner.optimizer_memory to host"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_setting_to_change(
    plan: Plan, changes: dict, phase: str, knob: str
):
    parts = {"weights": 100, "temporaries": 300, "optimiser": 0, "KV pages": 0}
    parts["KV pages" if phase == "sampling" else "temporaries"] += 600
    if changes.get("engine"):
        parts |= {"optimiser": 100, "weights": 0}
    large = memory.Phase(phase, parts)
    found = memory.Memory([memory.Phase("other", {"weights": 100}), large], 0)
    config = change(plan.config, **changes)
    room = 1080  # 8% of it are 86
    text = memory.refusal(config, one_device(room), plan.programs, found)
    assert text.startswith(f"{phase} takes ") and knob in text
    assert not memory.refusal(config, one_device(1088), plan.programs, found)


def test_a_program_that_the_compiler_refuses_is_named(plan: Plan):
    program = Compiled("learner", "gradient", 0, 0, 0, 0, 1.0, "Used 20.1G of 15.7G hbm")
    text = memory.refusal(plan.config, plan.site, [program], None)
    assert text.startswith("the program gradient does not compile for a chip: Used 20.1G of 15.7G")


def test_the_last_microbatch_may_have_half_the_rows(plan: Plan):
    assert microbatch_rows(plan.config) == [1]
    many = change(plan.config, batch={"device_tokens": 704 * 5})
    assert microbatch_rows(many) == [5, 3]
    both = change(many, learner={"kl_coef": 0.1, "epochs": 2})
    shapes = row_shapes(both, 5)
    assert shapes.tokens.shape == (5, 704)
    assert shapes.reference_logprobs.shape == shapes.old_logprobs.shape == (5, 704)
    assert row_shapes(many, 5).reference_logprobs is None


@pytest.mark.parametrize(("room", "code"), [(GIB, 0), (2**17, 1)])
def test_the_command(
    plan: Plan, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, room: int, code: int
):
    monkeypatch.setattr(command, "find_site", lambda name: one_device(room))
    monkeypatch.setattr(command, "compile_all", lambda *_: plan.programs)
    monkeypatch.setattr(cli, "load_config", lambda path: small(load_config(path)))
    arguments = ["plan", str(MICRO), "--topology", "local", "--utilisation", "0.5"]
    assert cli.main([*arguments, "--run.steps", "9"]) == code
    output, errors = capsys.readouterr()
    assert "to spare of" in output and "seconds at peak" in output and "50% of them" in output
    refusals = [line for line in errors.splitlines() if line.startswith("spade-jax: this does not")]
    assert len(refusals) == code
    assert cli.main([*arguments, "--json", "--episode-tokens", "100"]) == code
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is (code == 0) and found["assumed"]["episode_tokens"] == 100
    assert found["step"]["expected_s"] == pytest.approx(2 * found["step"]["roofline_s"])
    assert set(found["memory"]) == {"sampling", "weight move", "gradient", "optimiser"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["configs/none.py", "--topology", "local"], "'configs/none.py' does not exist"),
        ([str(MICRO)], "--topology"),
        (["--topology", "local"], "plan needs a config file first"),
        ([str(MICRO), "--topology", "v9:2x2"], "--topology 'v9:2x2' is unknown"),
        ([str(MICRO), "--topology", "local", "--mesh.tenser", "2"], "did you mean mesh.tensor?"),
        ([str(MICRO), "--topology", "local", "--utilisation", "2"], "at most 1"),
        ([str(MICRO), "--topology", "local", "--episode-tokens", "1"], "at least 16"),
        (
            [str(MICRO), "--topology", "local", "--episode-tokens", "99999"],
            "more than engine.context_tokens=",
        ),
        ([str(MICRO), "--topology", "local", "--mesh.tensor", "5"], "does not divide the 8"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture):
    assert cli.main(["plan", *arguments]) == 2
    errors = capsys.readouterr().err
    assert said in errors and "Traceback" not in errors


def test_help_lists_the_options(capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit):
        cli.main(["plan", "--help"])
    text = capsys.readouterr().out
    assert "--topology NAME" in text and "v5p:4x4x4" in text
