"""What a Hugging Face config.json says is honoured or refused by name. Defaults are those of
transformers 5.24, read off its configuration classes.
"""

import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from models.config import RopeScaling, TransformerConfig, from_dict, read_config
from models.errors import ModelError
from models.hf import FAMILIES, from_hf, to_hf
from models.layers import rotary_angles, rotary_frequencies

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LLAMA = SIZES | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
QWEN2 = SIZES | {"model_type": "qwen2"}
QWEN3 = SIZES | {"model_type": "qwen3"}
MOE = SIZES | {
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 12,
    "num_experts": 6,
    "num_experts_per_tok": 2,
}


def read(values):
    return from_hf(values, "config.json")


def without(values, name):
    return {key: value for key, value in values.items() if key != name}


def test_defaults_of_each_family():
    llama = read(without(LLAMA, "num_key_value_heads"))
    assert (llama.num_kv_heads, llama.head_dim, llama.max_positions) == (4, 8, 2048)
    assert (llama.rope_theta, llama.norm_eps, llama.tied_head) == (10_000.0, 1e-6, False)
    assert read(QWEN2).max_positions == 32_768 and read(QWEN2).qkv_bias
    assert read(QWEN3).head_dim == 128 and read(QWEN3).qk_norm
    moe = read(MOE)
    assert (moe.head_dim, moe.mlp, moe.norm_topk_prob) == (8, 12, False)
    assert read(MOE | {"norm_topk_prob": True}).norm_topk_prob
    assert read(without(MOE, "num_experts") | {"num_local_experts": 5}).num_experts == 5


def test_both_spellings_of_rope_are_read():
    old = LLAMA | {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    new = LLAMA | {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}}
    assert read(old) == read(new)
    assert read(old).rope_scaling == RopeScaling("linear", 2.0) and read(old).rope_theta == 5e5
    assert read(LLAMA | {"rope_scaling": {"rope_type": "default"}}).rope_scaling is None


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 1},
        {"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 2},
        {"use_sliding_window": True},  # the default window begins at layer 28
        {"layer_types": ["full_attention"] * 2},
        {"attention_bias": True},  # qwen2 has its biases whatever this says
        {"mlp_only_layers": [], "decoder_sparse_step": 1, "quantization_config": None},
        {"transformers_version": "4.0", "torch_dtype": "bfloat16", "use_cache": True},
    ],
)
def test_what_changes_nothing_passes(changes):
    assert read(QWEN2 | changes) == read(QWEN2)


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("values", "part"),
    [
        (LLAMA | {"model_type": "gemma"}, "architecture 'gemma' is not supported"),
        (without(LLAMA, "model_type"), "architecture None"),
        (LLAMA | {"architectures": ["LlamaForSequenceClassification"]}, "architectures="),
        (LLAMA | {"attention_bias": True}, "attention_bias=True"),
        (QWEN3 | {"attention_bias": True}, "attention_bias=True"),
        (LLAMA | {"mlp_bias": True}, "mlp_bias=True"),
        (LLAMA | {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        (LLAMA | {"rope_interleaved": True}, "rope_interleaved=True"),
        (LLAMA | {"quantization_config": {"bits": 4}}, "quantization_config="),
        (LLAMA | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope scaling 'yarn'"),
        (LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope scaling 'dynamic'"),
        (LLAMA | {"rope_scaling": {"type": "linear"}}, "factor=None"),
        (LLAMA | {"rope_scaling": LLAMA3}, "original_max_position_embeddings=None"),
        (LLAMA | {"rope_scaling": {"mrope_section": [1, 2]}}, "mrope_section=[1, 2]"),
        (LLAMA | {"rope_parameters": {"full": {"rope_theta": 1e4}}}, "one flat object"),
        (LLAMA | {"rope_scaling": [1]}, "one flat object"),
        (LLAMA | {"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": LLAMA3}, "differs"),
        (LLAMA | {"rope_theta": 0}, "rope_theta=0"),
        (
            LLAMA | {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}},
            "rope_theta=10000.0 is not supported; rope_parameters say 500000.0",
        ),
        (QWEN2 | {"use_sliding_window": True, "max_window_layers": 1}, "use_sliding_window=True"),
        (MOE | {"use_sliding_window": True}, "use_sliding_window=True"),
        (QWEN2 | {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types="),
        (MOE | {"decoder_sparse_step": 2}, "decoder_sparse_step=2"),
        (MOE | {"mlp_only_layers": [0]}, "mlp_only_layers=[0]"),
        (MOE | {"num_experts_per_tok": 1, "norm_topk_prob": True}, "num_experts_per_tok=1"),
        (MOE | {"num_experts_per_tok": 7}, "experts_per_token=7"),
        (without(QWEN2, "num_key_value_heads"), "num_key_value_heads=None"),
        (without(LLAMA, "hidden_size"), "hidden_size=None"),
        (LLAMA | {"hidden_size": 30}, "head_dim=None"),
        (LLAMA | {"num_attention_heads": 3, "hidden_size": 30}, "num_kv_heads=2"),
        (LLAMA | {"head_dim": 7}, "head_dim=7"),
        (LLAMA | {"num_hidden_layers": 10**12}, "num_hidden_layers=1000000000000"),
        (LLAMA | {"vocab_size": 10**12}, "vocab_size=1000000000000"),
        (LLAMA | {"num_hidden_layers": "2"}, "num_hidden_layers='2'"),
        (LLAMA | {"num_hidden_layers": True}, "num_hidden_layers=True"),
        (LLAMA | {"num_hidden_layers": 0}, "num_hidden_layers=0"),
        (LLAMA | {"rms_norm_eps": "small"}, "rms_norm_eps='small'"),
        (LLAMA | {"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes'"),
        ([1, 2], "holds list"),
        ("text", "holds str"),
    ],
)
def test_what_cannot_be_honoured_is_named(values, part):
    with pytest.raises(ModelError) as caught:
        read(values)
    assert part in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("values", [LLAMA, QWEN2, QWEN3, MOE])
def test_to_hf_is_the_inverse(values):
    scaled = LLAMA3 | {"original_max_position_embeddings": 64}
    for changes in ({}, {"rope_scaling": scaled}, {"tie_word_embeddings": True}):
        config = read(values | changes)
        assert read(json.loads(json.dumps(to_hf(config)))) == config


def test_our_own_family_has_no_public_form():
    assert "spade" not in FAMILIES
    with pytest.raises(ModelError, match="spade has no Hugging Face form"):
        to_hf(TransformerConfig())


def test_our_config_comes_back_from_its_file(tmp_path: Path):
    scaled = LLAMA3 | {"original_max_position_embeddings": 64}
    config = read(LLAMA | {"rope_scaling": scaled})
    (tmp_path / "config.json").write_text(json.dumps(dataclasses.asdict(config)))
    assert read_config(tmp_path) == config
    assert from_dict({"num_layers": 3}, "x") == TransformerConfig(num_layers=3)


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ([], "holds list"),
        ({"hidden_size": 8}, "hidden_size; a public checkpoint"),
        ({"num_layers": 10**12}, "num_layers=1000000000000"),
        ({"num_layers": 2.0}, "num_layers=2.0"),
        ({"num_layers": "2"}, "num_layers='2'"),
        ({"rope_theta": "x"}, "rope_theta='x' is not a number"),
        ({"norm_eps": True}, "norm_eps=True is not a number"),
        ({"norm_eps": float("nan")}, "norm_eps=nan"),
        ({"rope_theta": float("inf")}, "rope_theta=inf"),
        ({"qk_norm": "yes"}, "qk_norm='yes' is not true or false"),
        ({"family": "mamba"}, "family='mamba' is unknown"),
        ({"family": ["llama"]}, "family=['llama'] is unknown"),
        ({"rope_scaling": {"kind": "yarn", "factor": 2.0}}, "config.json"),
        ({"rope_scaling": {"factor": 2.0}}, "cannot be read"),
        ({"rope_scaling": [1]}, "cannot be read"),
    ],
)
def test_a_damaged_config_of_ours_is_refused(values, part):
    with pytest.raises(ModelError) as caught:
        from_dict(values, "config.json")
    assert part in str(caught.value)


def test_rotary_frequencies_by_hand():
    plain = rotary_frequencies(4, 100.0)
    assert np.array_equal(plain, np.float32([1.0, 0.1]))
    assert np.array_equal(rotary_frequencies(4, 100.0, RopeScaling("linear", 4.0)), plain / 4)
    # Context 64 holds 64 / (2 pi) = 10.19 turns of the first pair and 1.019 of the second:
    # above 4 it is kept, and of the second (1.019 - 1) / 3 = 0.0062 is.
    scaled = rotary_frequencies(4, 100.0, RopeScaling("llama3", 8.0, 1.0, 4.0, 64))
    kept = (64 / (2 * np.pi / 0.1) - 1) / 3
    assert scaled[0] == 1.0
    np.testing.assert_allclose(scaled[1], (1 - kept) * 0.1 / 8 + kept * 0.1, rtol=1e-6)
    slow = rotary_frequencies(4, 1e6, RopeScaling("llama3", 8.0, 1.0, 4.0, 64))
    np.testing.assert_allclose(slow[1], 1e-3 / 8, rtol=1e-6)


def test_angles_far_along_are_those_of_double_precision():
    positions = jnp.asarray([[4097, 32_000, 131_071]], jnp.int32)
    cos, sin = rotary_angles(positions, 64, 500_000.0)
    # The frequencies are float32 in every implementation; what follows must add nothing.
    angles = np.asarray(positions)[0, :, None] * rotary_frequencies(64, 500_000.0)
    angles = angles.astype(np.float32).astype(np.float64)
    np.testing.assert_allclose(np.asarray(cos)[0, :, 0], np.cos(angles), atol=2e-7)
    np.testing.assert_allclose(np.asarray(sin)[0, :, 0], np.sin(angles), atol=2e-7)
