"""Round trips, and one clear error for each way in which a folder of weights can be wrong."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from models import layout
from models.config import TransformerConfig
from models.errors import ModelError
from models.execution import PLAIN
from models.sharding import build_mesh, param_shardings
from models.transformer import abstract_params
from models.weights import load_weights, save_weights

# Eleven layers: their names sort 0, 1, 10, 2 as text.
DEEP = TransformerConfig(
    vocab_size=8,
    num_layers=11,
    embed=4,
    num_heads=2,
    num_kv_heads=2,
    head_dim=2,
    mlp=4,
    num_experts=2,
    experts_per_token=1,
    tied_head=False,
)
SMALL = dataclasses.replace(DEEP, num_layers=1)


def random_params(config: TransformerConfig, seed: int):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape), jnp.float32),
        abstract_params(config),
    )


@pytest.fixture(scope="module")
def params():
    return random_params(SMALL, 0)


@pytest.fixture
def folder(tmp_path: Path, params) -> Path:
    save_weights(tmp_path, SMALL, params)
    return tmp_path


def rewrite(folder: Path, change) -> None:
    """Load the tensors, let `change` edit the dictionary, and write them back."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_float32_round_trip_is_exact(tmp_path: Path):
    params = random_params(DEEP, 1)
    save_weights(tmp_path, DEEP, params, dtype="float32")
    loaded = load_weights(tmp_path, DEEP)
    assert jax.tree.structure(loaded) == jax.tree.structure(params)
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, loaded, params)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    assert json.loads((tmp_path / "config.json").read_text()) == dataclasses.asdict(DEEP)


def test_bfloat16_round_trip_rounds_once(folder: Path, params):
    loaded = load_weights(folder, SMALL)
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), params)
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, loaded, rounded)))
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(loaded))
    names = load_file(folder / "model.safetensors").keys()
    assert {"embedding", "head", "blocks.0.moe.gate_up", "blocks.0.attention.query"} <= names


def test_loads_onto_a_mesh(folder: Path):
    mesh = build_mesh(2, 2, 1, 2)
    loaded, expected = load_weights(folder, SMALL, mesh), load_weights(folder, SMALL)
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, loaded, expected)))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, loaded)
    assert jax.tree.leaves(shardings) == jax.tree.leaves(param_shardings(SMALL, mesh))


@pytest.mark.parametrize("sizes", [None, (2, 2, 1, 2)], ids=["one device", "mesh"])
def test_files_are_per_layer_and_load_into_either_layout(tmp_path: Path, sizes):
    execution = dataclasses.replace(PLAIN, layers="scanned", param_dtype="bfloat16")
    mesh = None if sizes is None else build_mesh(*sizes)
    stack = layout.stacked(random_params(DEEP, 1))
    save_weights(tmp_path / "stack", DEEP, stack)
    save_weights(tmp_path / "list", DEEP, layout.per_layer(stack))
    content = (tmp_path / "stack" / "model.safetensors").read_bytes()
    assert content == (tmp_path / "list" / "model.safetensors").read_bytes()
    loaded = load_weights(tmp_path / "stack", DEEP, mesh, execution)
    assert jax.tree.structure(loaded) == jax.tree.structure(stack)
    for one, other in zip(jax.tree.leaves(loaded), jax.tree.leaves(stack), strict=True):
        assert one.dtype == jnp.bfloat16 and np.array_equal(one, other.astype(jnp.bfloat16))
    if mesh is not None:
        shardings = jax.tree.leaves(param_shardings(DEEP, mesh, execution))
        assert [leaf.sharding for leaf in jax.tree.leaves(loaded)] == shardings


def test_saving_over_weights_replaces_them(folder: Path):
    other = random_params(SMALL, 9)
    save_weights(folder, SMALL, other, dtype="float32")
    assert np.array_equal(load_weights(folder, SMALL)["head"][...], other["head"][...])


def missing(tensors):
    del tensors["head"]


def extra(tensors):
    tensors["lm_head.bias"] = np.zeros(3, np.float32)


def reshaped(tensors):
    tensors["head"] = tensors["head"].T.copy()


def not_a_number(tensors):
    tensors["head"] = np.full_like(tensors["head"], np.nan)


def integers(tensors):
    tensors["head"] = tensors["head"].astype(np.int32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (missing, r"missing \['head'\], unexpected none"),
        (extra, r"missing none, unexpected \['lm_head.bias'\]"),
        (reshaped, r"tensor head in .* has shape \(8, 4\), .* \(4, 8\)"),
        (not_a_number, r"tensor head in .* NaN or infinity"),
        (integers, r"tensor head in .* int32"),
    ],
)
def test_wrong_tensors_are_named(folder: Path, change, message):
    rewrite(folder, change)
    with pytest.raises(ModelError, match=message) as caught:
        load_weights(folder, SMALL)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_truncated_file_is_refused(folder: Path, keep):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"not a readable safetensors file") as caught:
        load_weights(folder, SMALL)
    assert str(folder) in str(caught.value)


def test_weights_of_another_model_are_refused(folder: Path):
    with pytest.raises(ModelError, match=r"model.mlp=8 \(saved: 4\)") as caught:
        load_weights(folder, dataclasses.replace(SMALL, mlp=8))
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("text", ["", "[1]", "{"])
def test_broken_config_is_refused(folder: Path, text):
    (folder / "config.json").write_text(text)
    with pytest.raises(ModelError, match=str(folder)):
        load_weights(folder, SMALL)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_absent_file_is_named(folder: Path, name):
    (folder / name).unlink()
    with pytest.raises(ModelError, match=name):
        load_weights(folder, SMALL)


def test_failed_write_leaves_the_old_weights(folder: Path, params, monkeypatch):
    before = (folder / "model.safetensors").read_bytes()

    def full_disk(tensors, path):
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("models.weights.save_file", full_disk)
    with pytest.raises(ModelError, match=r"cannot be written .*No space left"):
        save_weights(folder, SMALL, params)
    assert (folder / "model.safetensors").read_bytes() == before
    assert len(list(folder.iterdir())) == 2
