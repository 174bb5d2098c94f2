"""A warm start of a few steps leaves a folder that a run can start from, and repeats to the last
bit.
"""

import dataclasses
import itertools
from collections import Counter

import numpy as np
import pytest

from helpers import tree_allclose
from models.config import TransformerConfig
from models.execution import Execution
from models.tokenizer import load_tokenizer
from models.weights import load_weights
from spade_jax.config import Config, CorpusConfig, LearnerConfig, RunConfig, WarmstartConfig
from spade_jax.errors import ConfigError
from spade_jax.roles.corpus import Corpus
from spade_jax.roles.examples import Example
from spade_jax.rollout.chat import Chat
from spade_jax.types import Role
from spade_jax.warmstart import _batches, warmstart

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
        "copy_steps": 0,
        "out": str(tmp_path / name),
    }
    return Config(
        run=RunConfig(seed=3), model=MODEL, warmstart=WarmstartConfig(**(settings | overrides))
    )


def test_it_writes_tokenizer_and_weights_twice_the_same(tmp_path):
    for name in ("one", "two"):
        assert warmstart(config(tmp_path, name)) == tmp_path / name
    assert load_tokenizer(tmp_path / "one").vocab_size == MODEL.vocab_size
    load_weights(tmp_path / "one", MODEL)
    for file in ("model.safetensors", "tokenizer.model"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_a_warm_start_without_documents_is_refused(tmp_path):
    chosen = dataclasses.replace(config(tmp_path, "none"), corpus=CorpusConfig(enabled=False))
    with pytest.raises(ConfigError, match=r"corpus\.enabled=False.*leave it on"):
        warmstart(chosen)


def test_weights_that_are_too_coarse_to_train_are_refused(tmp_path):
    """Adapters would do in a run, and a warm start has none."""
    chosen = dataclasses.replace(
        config(tmp_path, "coarse"),
        execution=Execution(param_dtype="bfloat16"),
        learner=LearnerConfig(lora_rank=4),
    )
    with pytest.raises(ConfigError, match=r"param_dtype='bfloat16'.*leave it at 'float32'"):
        warmstart(chosen)


def test_rows_too_short_for_an_example_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"warmstart\.row_tokens=64"):
        warmstart(config(tmp_path, "short", row_tokens=64))
    assert list((tmp_path / "short").iterdir()) == []  # a failure leaves nothing half-made


def test_an_unwritable_folder_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    broken = dataclasses.replace(
        config(tmp_path, "x"), warmstart=WarmstartConfig(out=str(tmp_path / "file" / "x"))
    )
    with pytest.raises(ConfigError, match=r"warmstart\.out"):
        warmstart(broken)


def test_copy_exercises_come_first_and_the_shares_of_tokens_are_kept(tmp_path):
    settings = config(tmp_path, "shares", design_share=0.5, copy_share=0.3, copy_steps=3)
    corpus = Corpus.load(settings.corpus, 0)
    tokenizer = load_tokenizer("assets/tiny")
    play = Example(Role.AGENT, "play", np.ones(200, np.int32), np.ones(200, bool))
    batches = _batches(settings, corpus, Chat(tokenizer), [play])
    tokens = Counter()
    for batch in itertools.islice(batches, 3):
        assert {example.kind for example in batch} == {"copy"}
    for batch in itertools.islice(batches, 12):
        for example in batch:
            tokens[{"design": "text", "hint": "text"}.get(example.kind, example.kind)] += len(
                example.tokens
            )
    total = tokens.total()
    assert abs(tokens["text"] / total - 0.5) < 0.02
    assert abs(tokens["copy"] / total - 0.3) < 0.02
    assert abs(tokens["play"] / total - 0.2) < 0.02


def test_it_goes_on_from_weights(tmp_path):
    first = warmstart(config(tmp_path, "first", steps=1))
    second = warmstart(config(tmp_path, "second", steps=1, init_from=str(first), lr=1e-6))
    assert (first / "tokenizer.model").read_bytes() == (second / "tokenizer.model").read_bytes()
    # a step of 1e-6 moves nothing further than bfloat16 shows; new weights would be far away
    start, end = load_weights(first, MODEL), load_weights(second, MODEL)
    assert tree_allclose(start, end, rtol=0.02, atol=1e-3)
