"""Bad input is one line on stderr and exit code 2; good overrides reach the config."""

import dataclasses
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from models.config import RopeScaling
from models.errors import ModelError
from spade_jax import cli
from spade_jax.config import Config, to_dict
from spade_jax.errors import (
    CheckpointError,
    ConfigError,
    EndpointError,
    FinishedError,
    LostProcess,
    SandboxError,
    SandboxStartError,
    SilentEndpointError,
    StorageError,
    TransientError,
)

ROOT = Path(__file__).resolve().parents[2]
TINY = str(ROOT / "configs" / "tiny.py")
FROM_FOLDER = ["--designer.source", "folder", "--designer.no-train", "--reward.kind", "solve_rate"]


def test_every_preset_builds():
    presets = sorted((ROOT / "configs").glob("*.py"))
    assert {preset.stem for preset in presets} >= {"tiny", "micro"}
    for preset in presets:
        assert isinstance(cli.load_config(preset), Config)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["trian", TINY], ["unknown command 'trian'", "train"]),
        (["train"], ["config file"]),
        (["train", "--run.steps", "3"], ["config file", "--run.steps"]),
        (["train", "nowhere.py"], ["nowhere.py", "does not exist"]),
        (["train", TINY, "--run.step", "3"], ["--run.step", "did you mean run.steps"]),
        (["train", TINY, "--lr", "3"], ["unknown option --lr"]),
        (["train", TINY, "--run.steps", "abc"], ["run.steps", "'abc'", "int", "12"]),
        (["train", TINY, "--run.steps", "3", "4"], ["'4'", "after --run.steps '3'"]),
        (["train", TINY, "--run.dir", "x", "run.steps"], ["'run.steps'", "after --run.dir 'x'"]),
        (["train", TINY, "--learner.weight-decay", "inf"], ["learner.weight_decay=inf", "float"]),
        (["train", TINY, "--model.rope-theta", "nan"], ["model.rope_theta=nan", "finite"]),
        (["train", TINY, "--run.steps"], ["run.steps", "int"]),
        (["train", TINY, "--run.steps", "0"], ["run.steps=0", "at least 1"]),
        (["train", TINY, "--learner.lr", "nan"], ["learner.lr"]),
        (["train", TINY, "stray"], ["stray"]),
        (["train", TINY, "--designer.difficulty", "harsh"], ["'harsh'", "medium"]),
        (["train", TINY, "--designer.skills", "Cooking"], ["Cooking", "Optimization"]),
        (["train", TINY, "--designer.designs", "2"], ["designer.designs=2", "at least 3"]),
        (["train", TINY, "--model.num-heads", "5"], ["model.num_heads=5", "num_kv_heads=3"]),
        (
            ["train", TINY, "--engine.context-tokens", "4096"],
            ["engine.context_tokens=4096", "row_tokens"],
        ),
        (
            ["train", TINY, "--model.max-positions", "512"],
            ["engine.context_tokens=1024", "model.max_positions=512 at most"],
        ),
        (["train", TINY, "--corpus.path", "missing.jsonl"], ["missing.jsonl"]),
        (["train", TINY, "--run.init-from", "nothing"], ["nothing"]),
        (["train", TINY, "--resume"], ["--resume", "holds no run"]),
        (["warmstart", TINY, "--resume"], ["unknown option --resume"]),
        (["warmstart", TINY, "--profile"], ["unknown option --profile"]),
        (["train", TINY, "--run.dir", "ftp://host/x"], ["run.dir='ftp://host/x'", "gs"]),
        (["train", TINY, "--telemetry.profile-steps", "-1"], ["telemetry.profile_steps=-1"]),
        (["train", TINY, "--run.checkpoint-minutes", "-1"], ["run.checkpoint_minutes=-1"]),
        (["train", TINY, "--run.checkpoint-minutes", "inf"], ["run.checkpoint_minutes=inf"]),
        (["train", TINY, "--run.keep-every-steps", "-1"], ["run.keep_every_steps=-1"]),
        (["checkpoints"], ["RUN", "--help"]),
        (["train", TINY, "--run.compile-cache", "ftp://h/x"], ["run.compile_cache='ftp://h/x'"]),
        (["train", TINY, "--run.dir", "~nobody_here/x"], ["run.dir='~nobody_here/x'"]),
        (["train", TINY, "--engine.page-tokens", "1000000"], ["engine.page_tokens=1000000"]),
        (["checkpoints", "absent"], ["absent is not the folder of a run"]),
        # flags without a value stand between an option and its blame
        (
            ["train", TINY, "--telemetry.no-live", "--agent.plays", "0", "--designer.judge"],
            ["agent.plays=0", "at least 2"],
        ),
        (
            ["train", TINY, "--designer.source", "endpoint", "--designer.no-train"],
            ["endpoint.url=''", "designer.source=endpoint"],
        ),
        (["train", TINY, "--designer.source", "endpoint"], ["designer.train=True"]),
        (
            ["train", TINY, *FROM_FOLDER, "--designer.folder", "/nowhere"],
            ["designer.folder='/nowhere' cannot be read"],
        ),
        (["train", TINY, "--designer.skills", "Cooking"], ["designer.skills", "'Cooking'"]),
        (["train", TINY, "--designer.delay-steps", "99"], ["designer.delay_steps=99", "run.steps"]),
        (["train", TINY, "--engine.context-tokens", "700"], ["prompt takes 152 tokens"]),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, parts, capsys, tmp_path):
    if arguments[:1] == ["train"] and len(arguments) > 1 and arguments[1] == TINY:
        arguments = [*arguments[:2], "--run.dir", str(tmp_path / "run"), *arguments[2:]]
    assert cli.main(arguments) == 2
    message = capsys.readouterr().err.strip()
    assert message.startswith("spade-jax: ") and "\n" not in message
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("flags", "resume", "profile_steps"),
    [
        ([], False, 0),
        (["--resume"], True, 0),
        (["--resume-if-any", "--profile"], None, 3),
        (["--profile", "--telemetry.profile-steps", "7"], False, 7),
    ],
)
def test_flags_of_train(flags, resume, profile_steps, monkeypatch):
    called = []
    monkeypatch.setattr("spade_jax.train.train", lambda config, **how: called.append((config, how)))
    assert cli.main(["train", TINY, "--run.steps", "5", *flags]) == 0
    ((config, how),) = called
    assert how == {"resume": resume}
    assert config.telemetry.profile_steps == profile_steps
    assert config.run.steps == 5


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (ConfigError, 2),
        (CheckpointError, 2),
        (FinishedError, 2),
        (EndpointError, 2),
        (SandboxError, 2),
        (LostProcess, 3),
        (TransientError, 75),
        (StorageError, 75),
        (SilentEndpointError, 75),
        (SandboxStartError, 75),
    ],
)
def test_the_exit_code_says_whether_the_same_command_may_go_on_later(
    kind, code, monkeypatch, capsys
):
    def fails(config, **how):
        raise kind("what happened")

    monkeypatch.setattr("spade_jax.train.train", fails)
    assert cli.main(["train", TINY]) == code
    assert capsys.readouterr().err == "spade-jax: what happened\n"
    assert type(pickle.loads(pickle.dumps(kind("what happened")))) is kind


def test_overrides_reach_the_config():
    preset = cli.load_config(Path(TINY))
    arguments = ["--learner.lr", "3e-4", "--run.steps=20", "--designer.skills", "Optimization"]
    config = cli.parse_overrides(preset, [*arguments, "--telemetry.no-live"])
    assert (config.learner.lr, config.run.steps) == (3e-4, 20)
    assert config.designer.skills == ("Optimization",) and not config.telemetry.live
    assert config.model == preset.model
    assert to_dict(config)["learner"]["lr"] == 3e-4


def test_a_section_within_a_section_can_be_set_where_the_preset_has_it():
    preset = cli.load_config(Path(TINY))
    with pytest.raises(ConfigError, match=r"unknown option --model.rope-scaling.factor"):
        cli.parse_overrides(preset, ["--model.rope-scaling.factor", "4"])
    model = dataclasses.replace(preset.model, rope_scaling=RopeScaling("linear", 2.0))
    scaled = dataclasses.replace(preset, model=model)
    config = cli.parse_overrides(scaled, ["--model.rope-scaling.factor", "4"])
    assert config.model.rope_scaling == RopeScaling("linear", 4.0)
    for value, part in (("four", "'four' is not a valid float"), ("0.5", "factor=0.5 must be")):
        with pytest.raises((ConfigError, ModelError), match=part):
            cli.parse_overrides(scaled, ["--model.rope-scaling.factor", value])


def test_help_lists_every_field_with_default_and_doc(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["train", TINY, "--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    for section in dataclasses.fields(Config):
        for field in dataclasses.fields(section.default_factory()):
            if getattr(section.default_factory(), field.name) is None:
                continue  # a section that is absent has no options
            name = f"--{section.name}.{field.name.replace('_', '-')}"
            assert name in text
            told = " ".join(text.replace("│", " ").split()).split(name, 1)[1]
            # type, then words of our own, then the default
            assert len(told.split("(default", 1)[0].split()) >= 3, name
    assert "optimiser steps (default: 12)" in " ".join(text.replace("│", " ").split())


@pytest.mark.parametrize(
    ("source", "part"),
    [
        ("x = 1", "must define config()"),
        ("def config(): return 3", "must define config()"),
        ("def config(): 1 / 0", "ZeroDivisionError"),
        ("def config(:", "SyntaxError"),
        ("raise SystemExit(5)", "SystemExit"),
    ],
)
def test_a_broken_config_file_is_named(source, part, tmp_path, capsys):
    path = tmp_path / "broken.py"
    path.write_text(source)
    assert cli.main(["train", str(path)]) == 2
    assert part in capsys.readouterr().err


WRONG_TYPES = {
    "Config(agent=AgentConfig(thinking_tokens=5))": "agent.thinking_tokens=5",
    "Config(engine=EngineConfig(prefill_tokens=96))": "engine.prefill_tokens=96",
    "Config(engine=EngineConfig(piece_tokens=48))": "engine.piece_tokens=48",
    "Config(engine=EngineConfig(kv_tokens=20))": "engine.kv_tokens=20",
    "Config(engine=EngineConfig(queue=-1))": "engine.queue=-1",
    "Config(run=None)": "config.run=None is not a valid RunConfig",
    "Config(run=RunConfig(steps='3'))": "run.steps='3' is not a valid int",
    "Config(run=RunConfig(steps=3.5))": "run.steps=3.5 is not a valid int",
    "Config(run=RunConfig(dir=Path('x')))": "run.dir=PosixPath('x') is not a valid str",
    "Config(learner=LearnerConfig(lr=True))": "learner.lr=True is not a valid float",
    "Config(designer=DesignerConfig(difficulty='huge'))": "designer.difficulty='huge'",
    "Config(designer=DesignerConfig(skills=['a']))": "designer.skills=['a'] is not a valid tuple",
}


def test_wrong_types_in_a_config_file_are_named(tmp_path):
    # In a process of its own: here, the tests' type checker would be faster.
    run = "import sys; from spade_jax.cli import main; [main(['train', p]) for p in sys.argv[1:]]"
    paths = []
    for index, made in enumerate(WRONG_TYPES):
        paths.append(tmp_path / f"{index}.py")
        paths[-1].write_text(
            f"from pathlib import Path\nfrom spade_jax.config import *\ndef config(): return {made}"
        )
    done = subprocess.run([sys.executable, "-c", run, *paths], capture_output=True, text=True)
    lines = done.stderr.splitlines()
    assert len(lines) == len(WRONG_TYPES)
    for line, part in zip(lines, WRONG_TYPES.values(), strict=True):
        assert part in line


def test_no_arguments_shows_usage(capsys):
    assert cli.main([]) == 2
    assert "train" in capsys.readouterr().out


def test_a_message_that_quotes_a_hostile_file_is_short_and_harmless():
    line = cli._one_line("a \x1b[2J\x07\u202e\ud800\n b" + "x" * 10**6)
    assert line.startswith(r"a \x1b[2J\x07\u202e\ud800 bxxx") and len(line) < 3000
