"""Every family against transformers: logits, gradients, and the way back, bit for bit.

The values in `golden/` were made by `make_golden.py`, which says how.
"""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import layout, tensors
from models.config import RopeScaling
from models.convert import StoredWeights, export_checkpoint, import_checkpoint
from models.execution import PLAIN
from models.sharding import build_mesh, param_shardings
from models.shards import SafetensorsFolder
from models.transformer import abstract_params, forward, logits
from models.weights import load_weights, named_leaves

GOLDEN = Path(__file__).parent / "golden"
NAMES = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())


@pytest.fixture(scope="module", params=NAMES)
def converted(request, tmp_path_factory):
    """A golden folder, its converted form, and the config."""
    folder = tmp_path_factory.mktemp("converted") / request.param
    config = import_checkpoint(GOLDEN / request.param, folder)
    return GOLDEN / request.param, folder, config


def test_all_families_have_one():
    expected = ["llama", "llama3", "llama_linear", "qwen2", "qwen3", "qwen3_moe", "qwen3_moe_raw"]
    assert expected == NAMES


def test_what_sets_a_family_apart_is_read(converted):
    source, _, config = converted
    families = {"llama3": "llama", "llama_linear": "llama", "qwen3_moe_raw": "qwen3_moe"}
    assert config.family == families.get(source.name, source.name)
    assert not config.scale_embedding and config.max_positions == 32768
    assert config.tied_head == (source.name in ("llama3", "qwen2"))
    assert config.qkv_bias == (source.name == "qwen2")
    assert config.qk_norm == source.name.startswith("qwen3")
    assert config.norm_topk_prob == (source.name != "qwen3_moe_raw")
    assert config.norm_eps == (1e-5 if source.name == "llama" else 1e-6)
    scalings = {
        "llama3": RopeScaling("llama3", 8.0, 1.0, 4.0, 256),
        "llama_linear": RopeScaling("linear", 4.0),
    }
    assert config.rope_scaling == scalings.get(source.name)


def loss_of(config, params, golden):
    """The loss of `make_golden.evaluate`, from packed rows."""
    tokens, segments = golden["tokens"], golden["segments"]
    hidden = forward(config, params, tokens, golden["positions"], segment_ids=segments).hidden
    scores = logits(config, params, hidden)
    predicted = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    picked = jnp.take_along_axis(jax.nn.log_softmax(scores[:, :-1]), tokens[:, 1:, None], axis=-1)[
        :, :, 0
    ]
    count = jnp.sum(predicted, dtype=jnp.float32)
    return -jnp.sum(jnp.where(predicted, picked, 0.0)) / count, scores


def test_logits_and_gradients_are_those_of_transformers(converted):
    source, folder, config = converted
    golden = {key: jnp.asarray(value) for key, value in np.load(source / "golden.npz").items()}
    params = load_weights(folder, config)
    run = jax.jit(jax.value_and_grad(lambda params: loss_of(config, params, golden), has_aux=True))
    (loss, scores), grads = run(params)
    live = np.asarray(golden["segments"]) > 0
    difference = np.abs(np.asarray(scores) - golden["logits"])[live]
    assert live.sum() > 80 and difference.max() < 1e-4
    assert abs(float(loss) - float(golden["loss"])) < 1e-5
    found = {}
    for group in tensors.group_names(config):
        prefix = "" if group == tensors.OUTER else f"{group}."
        values = {name: np.asarray(value) for name, value in named_leaves(grads)}
        for tensor in tensors.group(config, group):
            found |= zip(tensor.parts, tensor.split(values[prefix + tensor.name]), strict=True)
    expected = {key[5:]: value for key, value in golden.items() if key.startswith("grad.")}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        error = np.linalg.norm(found[name] - value) / np.linalg.norm(value)
        assert error < 1e-4, (name, error)


def test_the_way_back_is_exact(converted, tmp_path):
    source, folder, config = converted
    back = tmp_path / "back"
    export_checkpoint(StoredWeights(folder), config, folder, back, shard_bytes=30_000)
    ours, theirs = SafetensorsFolder(back), SafetensorsFolder(source)
    assert set(ours.names()) == set(theirs.names())
    for name in theirs.names():
        assert ours.dtype(name) == theirs.dtype(name)
        assert ours.read(name).tobytes() == theirs.read(name).tobytes(), name
    made, given = (json.loads((f / "config.json").read_text()) for f in (back, source))
    assert made == given
    assert (back / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert len(list(back.glob("*.safetensors"))) > 1


def test_a_mesh_gets_the_same_weights(converted):
    _, folder, config = converted
    mesh = build_mesh(1, 2, 2, 2) if config.num_experts > 1 else build_mesh(2, 2, 1, 2)
    loaded, expected = load_weights(folder, config, mesh), load_weights(folder, config)
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, loaded, expected)))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, loaded)
    assert jax.tree.leaves(shardings) == jax.tree.leaves(param_shardings(config, mesh))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scanned_layers_get_the_same_weights(converted, dtype):
    _, folder, config = converted
    mesh = build_mesh(1, 2, 2, 2) if config.num_experts > 1 else build_mesh(2, 2, 1, 2)
    execution = dataclasses.replace(PLAIN, layers="scanned", param_dtype=dtype)
    expected = layout.stacked(load_weights(folder, config))
    for place in (None, mesh):
        loaded = load_weights(folder, config, place, execution)
        assert jax.tree.structure(loaded) == jax.tree.structure(expected)
        equal = jax.tree.map(lambda x, y: np.array_equal(x, y.astype(dtype)), loaded, expected)
        assert all(jax.tree.leaves(equal))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, loaded)
    assert jax.tree.leaves(shardings) == jax.tree.leaves(param_shardings(config, mesh, execution))


def test_the_table_of_tensors_is_that_of_the_transformer(converted):
    _, _, config = converted
    for tied in (True, False):
        model = dataclasses.replace(config, tied_head=tied)
        expected = {name: leaf.shape for name, leaf in named_leaves(abstract_params(model))}
        found = {}
        for group in tensors.group_names(model):
            prefix = "" if group == tensors.OUTER else f"{group}."
            found |= {prefix + t.name: t.shape for t in tensors.group(model, group)}
        assert found == expected
