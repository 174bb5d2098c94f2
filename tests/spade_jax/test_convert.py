"""A run's parameters leave as weights to start from, and as a public checkpoint."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from helpers import tree_allclose
from models import tensors
from models.config import read_config
from models.convert import import_checkpoint
from models.sharding import build_mesh
from models.shards import SafetensorsFolder
from models.weights import load_weights, named_leaves, save_weights
from spade_jax import cli
from spade_jax.config import Config, LearnerConfig, RunConfig, to_dict
from spade_jax.learner.checkpoint import Checkpoints
from spade_jax.learner.manifest import commit
from spade_jax.learner.step import Learner
from spade_jax.telemetry.sinks import RunFolder

GOLDEN = Path(__file__).parents[1] / "models" / "golden"


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Path:
    """A converted checkpoint that runs start from."""
    folder = tmp_path_factory.mktemp("start") / "start"
    import_checkpoint(GOLDEN / "qwen3_moe", folder)
    return folder


def make_run(path: Path, start: Path, steps=(0, 1), **learner) -> Path:
    """A run folder with checkpoints in which every parameter is the start's plus the step."""
    config = Config(
        run=RunConfig(dir=str(path), init_from=str(start)),
        model=read_config(start),
        learner=LearnerConfig(**learner),
    )
    run = RunFolder(path)
    run.save_config(to_dict(config))
    mesh = build_mesh(1, 2, 2, 2)
    learner = Learner(config.model, config.learner, mesh)
    with Checkpoints(run.checkpoints, 2, {}) as checkpoints:
        for step in steps:
            params = load_weights(start, config.model, mesh)
            params = jax.tree.map(lambda leaf, step=step: leaf + np.float32(step), params)
            checkpoints.save(step, learner.init(params), {})
    return path


@pytest.fixture
def run(tmp_path: Path, start: Path) -> Path:
    return make_run(tmp_path / "run", start)


def test_a_run_is_exported(run: Path, start: Path, tmp_path: Path):
    assert cli.main(["convert", str(run), str(tmp_path / "out"), "--to", "hf"]) == 0
    config = read_config(start)
    given = dict(named_leaves(load_weights(start, config)))
    found = SafetensorsFolder(tmp_path / "out")
    for group in tensors.group_names(config):
        prefix = "" if group == tensors.OUTER else f"{group}."
        for tensor in tensors.group(config, group):
            expected = tensor.split(np.asarray(given[prefix + tensor.name]) + np.float32(1))
            for part, value in zip(tensor.parts, expected, strict=True):
                assert np.array_equal(found.read(part), value), part
    public = json.loads((tmp_path / "out" / "config.json").read_text())
    assert public == json.loads((GOLDEN / "qwen3_moe" / "config.json").read_text())
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_a_run_becomes_weights_to_start_from(run: Path, start: Path, tmp_path: Path):
    assert cli.main(["convert", str(run), str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0
    config = read_config(tmp_path / "out")
    assert config == read_config(start)
    expected = jax.tree.map(
        lambda leaf: (leaf + np.float32(1)).astype("bfloat16").astype("float32"),
        load_weights(start, config),
    )
    loaded = load_weights(tmp_path / "out", config)
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, loaded, expected)))


def test_the_adapters_of_a_run_are_merged(tmp_path: Path, start: Path):
    """What leaves is what the run samples with: the weights with A @ B * alpha / rank."""
    options = {"lora_rank": 2, "lora_alpha": 3.0}
    run = make_run(tmp_path / "run", start, steps=(), **options)
    config = read_config(start)
    learner = Learner(config, LearnerConfig(**options), build_mesh(1, 1, 1, 1, jax.devices()[:1]))
    state = learner.init(load_weights(start, config))
    rng = np.random.default_rng(0)
    drawn = jax.tree.map(
        lambda leaf: jax.device_put(rng.normal(size=leaf.shape).astype(np.float32)), state.adapters
    )
    state = state._replace(adapters=drawn)
    with Checkpoints(RunFolder(run).checkpoints, 1, {}) as checkpoints:
        checkpoints.save(0, state, {})
    assert cli.main(["convert", str(run), str(tmp_path / "out"), "--dtype", "float32"]) == 0
    loaded = load_weights(tmp_path / "out", config)
    policy = jax.device_get(learner.policy(state))
    assert tree_allclose(jax.device_get(loaded), policy, rtol=1e-5, atol=1e-5)
    query = policy["blocks"][0]["attention"]["query"][...]
    adapter = drawn["blocks"][0]["attention"]["query"]
    a, b = np.asarray(adapter["a"][...]), np.asarray(adapter["b"][...])
    frozen = np.asarray(load_weights(start, config)["blocks"][0]["attention"]["query"][...])
    np.testing.assert_allclose(query, frozen + 1.5 * np.tensordot(a, b, 1), rtol=1e-4, atol=1e-5)


def test_a_run_of_our_own_family(tmp_path: Path, start: Path, capsys):
    config = dataclasses.replace(read_config(start), family="spade", scale_embedding=True)
    own = tmp_path / "own"
    save_weights(own, config, load_weights(start, read_config(start)), dtype="float32")
    run = make_run(tmp_path / "run", own, steps=(0,))
    shutil.copy(GOLDEN / "llama" / "tokenizer.json", run)
    assert cli.main(["convert", str(run), str(tmp_path / "out")]) == 0
    loaded, expected = load_weights(tmp_path / "out", config), load_weights(own, config)
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, loaded, expected)))
    assert cli.main(["convert", str(run), str(tmp_path / "hf"), "--to", "hf"]) == 2
    assert "family=spade has no Hugging Face form" in capsys.readouterr().err


def test_a_run_that_cannot_be_read_is_one_line(run: Path, tmp_path: Path, capsys):
    arguments = ["convert", str(run), str(tmp_path / "out")]
    newest = run / "checkpoints" / "1"
    path = max((newest / "state").rglob("*"), key=lambda p: p.stat().st_size)
    path.write_bytes(path.read_bytes()[:-1])
    assert cli.main(arguments) == 2 and "is damaged" in capsys.readouterr().err
    config = json.loads((run / "config.json").read_text())
    for name in ("0", "1"):
        shutil.rmtree(run / "checkpoints" / name)
    assert cli.main(arguments) == 2 and "has no checkpoint yet" in capsys.readouterr().err
    make_run(run, Path(config["run"]["init_from"]), steps=(4,))
    newest = run / "checkpoints" / "5"
    newest.mkdir()
    (newest / "host.json").write_text("{}")
    commit(newest)  # whole, by its list, and without arrays
    assert cli.main(arguments) == 2 and "5 cannot be read" in capsys.readouterr().err
    (newest / "files.json").unlink()  # a save that is under way does not count
    (run / "config.json").write_text("[" * 100_000)
    assert cli.main(arguments) == 2 and "is damaged" in capsys.readouterr().err
    config["model"]["num_layers"] = 3
    (run / "config.json").write_text(json.dumps(config))
    assert cli.main(arguments) == 2
    assert "lacks params.blocks.2." in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_run_that_started_from_no_name_has_its_own_tokenizer(run: Path, tmp_path: Path):
    config = json.loads((run / "config.json").read_text())
    config["run"]["init_from"] = ["x"]
    (run / "config.json").write_text(json.dumps(config))
    shutil.copy(GOLDEN / "llama" / "tokenizer.json", run)
    assert cli.main(["convert", str(run), str(tmp_path / "out")]) == 0


def test_what_a_public_config_cannot_say_does_not_leave(tmp_path: Path, start: Path, capsys):
    """Others would load such a model without a word, and compute another one."""
    config = dataclasses.replace(read_config(start), scale_embedding=True)
    own = tmp_path / "own"
    save_weights(own, config, load_weights(start, read_config(start)), dtype="float32")
    run = make_run(tmp_path / "run", own, steps=(0,))
    shutil.copy(GOLDEN / "llama" / "tokenizer.json", run)
    assert cli.main(["convert", str(run), str(tmp_path / "hf"), "--to", "hf"]) == 2
    assert "scale_embedding=True (expected False)" in capsys.readouterr().err
    assert not (tmp_path / "hf").exists()


def test_a_folder_without_rights_is_one_line(start: Path, tmp_path: Path, capsys, monkeypatch):
    def denied(folder):
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr("models.convert.SafetensorsFolder", denied)
    arguments = ["convert", str(GOLDEN / "llama"), str(tmp_path / "out")]
    assert cli.main(arguments) == 2
    assert "cannot be converted" in capsys.readouterr().err
