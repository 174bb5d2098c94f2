"""A warm start of a few steps leaves a folder that a run can start from, and repeats to the last
bit.
"""

import dataclasses

import pytest

from helpers import tree_allclose
from models.config import TransformerConfig
from models.tokenizer import Tokenizer
from models.weights import load_weights
from spade_jax.config import Config, RunConfig, WarmstartConfig
from spade_jax.errors import ConfigError
from spade_jax.warmstart import TOKENIZER_FILE, warmstart

MODEL = TransformerConfig(
    vocab_size=800,
    num_layers=1,
    embed=16,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    mlp=8,
    num_experts=2,
)


def config(tmp_path, name, **overrides):
    settings = {
        "steps": 2,
        "rows": 8,
        "plays": 6,
        "log_steps": 1,
        "words": 100,
        "out": str(tmp_path / name),
    }
    return Config(
        run=RunConfig(seed=3), model=MODEL, warmstart=WarmstartConfig(**(settings | overrides))
    )


def test_it_writes_tokenizer_and_weights_twice_the_same(tmp_path):
    for name in ("one", "two"):
        assert warmstart(config(tmp_path, name)) == tmp_path / name
    assert Tokenizer.load(tmp_path / "one" / TOKENIZER_FILE).vocab_size == MODEL.vocab_size
    load_weights(tmp_path / "one", MODEL)
    for file in ("model.safetensors", TOKENIZER_FILE):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_rows_too_short_for_an_example_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"warmstart\.row_tokens=64"):
        warmstart(config(tmp_path, "short", row_tokens=64))


def test_an_unwritable_folder_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    broken = dataclasses.replace(
        config(tmp_path, "x"), warmstart=WarmstartConfig(out=str(tmp_path / "file" / "x"))
    )
    with pytest.raises(ConfigError, match=r"warmstart\.out"):
        warmstart(broken)


def test_the_weight_on_words_changes_what_is_learnt(tmp_path):
    plain = load_weights(warmstart(config(tmp_path, "plain", steps=1)), MODEL)
    stressed = load_weights(warmstart(config(tmp_path, "s", steps=1, word_weight=8.0)), MODEL)
    assert not tree_allclose(plain, stressed, rtol=0, atol=0)


def test_it_goes_on_from_weights(tmp_path):
    first = warmstart(config(tmp_path, "first", steps=1))
    second = warmstart(config(tmp_path, "second", steps=1, init_from=str(first), lr=1e-6))
    assert (first / TOKENIZER_FILE).read_bytes() == (second / TOKENIZER_FILE).read_bytes()
    # a step of 1e-6 moves nothing further than bfloat16 shows; new weights would be far away
    start, end = load_weights(first, MODEL), load_weights(second, MODEL)
    assert tree_allclose(start, end, rtol=0.02, atol=1e-3)
