"""GGUF files, written here with the package's own writer: the same weights as from the safetensors
they were made of, and one clear error for each way in which a file can be unusable.
"""

import json
import shutil
import struct
from pathlib import Path

import gguf
import jax
import ml_dtypes
import numpy as np
import pytest

from models import stored
from models.config import RopeScaling, TransformerConfig, read_config
from models.convert import import_checkpoint
from models.errors import ModelError
from models.gguf_file import EXPERTS, LAYER, OUTER, GGUFFile
from models.gguf_tokenizer import write_tokenizer
from models.hf import FAMILIES, from_hf
from models.layers import rotary_frequencies
from models.shards import SafetensorsFolder
from models.weights import load_weights

GOLDEN = Path(__file__).parent / "golden"
BF16 = np.dtype(ml_dtypes.bfloat16)
TOKENS = [*"abcd", "ab", "<|end|>", "<tool>", "[PAD]"]
TYPES = [1, 1, 1, 1, 1, 3, 4, 5]


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to query and key rows of a Llama."""
    shape = (heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return rows.reshape(shape).swapaxes(1, 2).reshape(rows.shape)


def tensors_of(source: Path, config: TransformerConfig) -> dict[str, np.ndarray]:
    """The tensors of a Hugging Face folder under their GGUF names."""
    folder = SafetensorsFolder(source)
    found = {
        name: np.asarray(folder.read(public))
        for name, public in OUTER.items()
        if public in set(folder.names())
    }
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        for name, public in LAYER.items():
            if prefix + public in set(folder.names()):
                value = np.asarray(folder.read(prefix + public))
                if config.family == "llama" and name.startswith("attn_q."):
                    value = interleaved(value, config.num_heads)
                if config.family == "llama" and name.startswith("attn_k."):
                    value = interleaved(value, config.num_kv_heads)
                found[f"blk.{layer}.{name}"] = value
        if config.num_experts > 1:
            for name, kind in EXPERTS.items():
                found[f"blk.{layer}.{name}"] = np.stack(
                    [
                        folder.read(f"{prefix}mlp.experts.{expert}.{kind}_proj.weight")
                        for expert in range(config.num_experts)
                    ]
                )
    return found


def write(path: Path, config: TransformerConfig, tensors, changes=None, raw=None) -> Path:
    """Write a GGUF file.

    Args:
        changes: metadata to add, or with None to leave out.
        raw: quantisation of tensors, by name.
    """
    architecture = FAMILIES[config.family].gguf
    metadata = {
        f"{architecture}.block_count": config.num_layers,
        f"{architecture}.context_length": config.max_positions,
        f"{architecture}.embedding_length": config.embed,
        f"{architecture}.feed_forward_length": config.mlp,
        f"{architecture}.attention.head_count": config.num_heads,
        f"{architecture}.attention.head_count_kv": config.num_kv_heads,
        f"{architecture}.attention.key_length": config.head_dim,
        f"{architecture}.attention.layer_norm_rms_epsilon": config.norm_eps,
        f"{architecture}.rope.freq_base": config.rope_theta,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": TYPES,
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 5,
        "tokenizer.chat_template": "{{ messages }}",
    }
    if config.num_experts > 1:
        metadata |= {
            f"{architecture}.expert_count": config.num_experts,
            f"{architecture}.expert_used_count": config.experts_per_token,
            f"{architecture}.expert_feed_forward_length": config.mlp,
        }
    metadata |= changes or {}
    writer = gguf.GGUFWriter(path, metadata.pop("general.architecture", architecture))
    for name, value in metadata.items():
        if isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif value is not None:
            writer.add_uint32(name, value)
    for name, value in tensors.items():
        kind = (raw or {}).get(name)
        if kind is None:
            writer.add_tensor(name, value)
        else:
            writer.add_tensor(name, gguf.quantize(value, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def read_source(name: str) -> tuple[TransformerConfig, dict[str, np.ndarray]]:
    config = from_hf(json.loads((GOLDEN / name / "config.json").read_text()), name)
    return config, tensors_of(GOLDEN / name, config)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """The golden Llama as a GGUF file."""
    return write(tmp_path / "model.gguf", *read_source("llama"))


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_a_gguf_file_gives_the_weights_it_was_made_of(tmp_path: Path, name):
    config, tensors = read_source(name)
    path = write(tmp_path / "model.gguf", config, tensors)
    assert import_checkpoint(path, tmp_path / "one") == config
    import_checkpoint(GOLDEN / name, tmp_path / "other")
    one, other = (load_weights(tmp_path / folder, config) for folder in ("one", "other"))
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, one, other)))


def test_quantised_tensors_are_what_the_package_makes_of_them(tmp_path: Path):
    config, tensors = read_source("llama")
    kinds = gguf.GGMLQuantizationType
    raw = {
        "token_embd.weight": kinds.Q8_0,
        "blk.0.ffn_up.weight": kinds.Q4_0,
        "blk.1.ffn_up.weight": kinds.BF16,
        "blk.1.ffn_gate.weight": kinds.BF16,
        "blk.0.attn_v.weight": kinds.F16,
    }
    path = write(tmp_path / "model.gguf", config, tensors, raw=raw)
    import_checkpoint(path, tmp_path / "target")
    file = GGUFFile(path)
    for name, public in (
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("blk.0.ffn_up.weight", "model.layers.0.mlp.up_proj.weight"),
    ):
        expected = gguf.dequantize(gguf.quantize(tensors[name], raw[name]), raw[name])
        assert np.array_equal(file.read(public), expected) and file.dtype(public) == np.float32
    half = file.read("model.layers.0.self_attn.v_proj.weight")
    assert half.dtype == np.float16
    assert stored.check_group(tmp_path / "target", config, "blocks.1")["moe.gate_up"] == BF16
    dtypes = stored.check_group(tmp_path / "target", config, "blocks.0")
    assert dtypes["attention.value"] == np.float16 and dtypes["attention.key"] == np.float32


def test_parts_of_one_parameter_in_two_dtypes_are_refused(tmp_path: Path):
    config, tensors = read_source("llama")
    raw = {"blk.1.ffn_up.weight": gguf.GGMLQuantizationType.BF16}
    path = write(tmp_path / "model.gguf", config, tensors, raw=raw)
    with pytest.raises(ModelError, match="they become one parameter; name a dtype"):
        import_checkpoint(path, tmp_path / "target")
    import_checkpoint(path, tmp_path / "target", dtype="float32")
    dtypes = stored.check_group(tmp_path / "target", config, "blocks.1")
    assert set(dtypes.values()) == {np.dtype(np.float32)}


def test_llama3_scaling_is_found_from_its_factors(tmp_path: Path):
    config, tensors = read_source("llama")
    scaling = RopeScaling("llama3", 32.0, 1.0, 4.0, 8192)
    plain = rotary_frequencies(config.head_dim, 500_000.0)
    factors = plain / rotary_frequencies(config.head_dim, 500_000.0, scaling)
    changes = {"llama.rope.freq_base": 500_000.0}
    tensors["rope_freqs.weight"] = factors.astype(np.float32)
    file = GGUFFile(write(tmp_path / "model.gguf", config, tensors, changes))
    assert file.config.rope_scaling == scaling and file.config.rope_theta == 500_000.0
    assert "rope_freqs.weight" not in file.names()
    for wrong in (np.linspace(1, 8, len(factors)), np.zeros(len(factors)), factors[:-1]):
        tensors["rope_freqs.weight"] = wrong.astype(np.float32)
        path = write(tmp_path / "wrong.gguf", config, tensors, changes)
        with pytest.raises(ModelError, match="not the factors of Llama 3 scaling"):
            GGUFFile(path)


def test_linear_scaling_is_read(tmp_path: Path):
    config, tensors = read_source("llama")
    changes = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    file = GGUFFile(write(tmp_path / "model.gguf", config, tensors, changes))
    assert file.config.rope_scaling == RopeScaling("linear", 4.0)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"general.architecture": "gemma2"}, "architecture 'gemma2' is not supported"),
        ({"llama.attention.sliding_window": 512}, "attention.sliding_window=512"),
        ({"llama.rope.dimension_count": 4}, "rope.dimension_count=4"),
        ({"llama.rope.scaling.type": "yarn"}, "rope scaling 'yarn'"),
        ({"llama.expert_count": 8}, "with experts is not supported"),
        ({"llama.attention.head_count": None}, "attention.head_count=None"),
        ({"llama.attention.head_count": 0}, "attention.head_count=0"),
        ({"llama.block_count": 4_000_000_000}, "num_hidden_layers=4000000000"),
        ({"llama.block_count": 4000}, "num_hidden_layers=4000"),
        ({"llama.block_count": 3}, "tensors are missing"),
        ({"llama.block_count": 1}, "tensors have no use"),
        ({"llama.embedding_length": 64}, "has shape"),
        ({"split.count": 3}, "one of 3 parts"),
        ({"split.count": [3]}, "split.count='[3]' is not of type int"),
        ({"llama.rope.scaling.factor": "2"}, "rope.scaling.factor='2' is not of type float"),
        ({"tokenizer.ggml.pre": [1]}, "tokenizer.ggml.pre='[1]' is not of type str"),
        ({"tokenizer.ggml.bos_token_id": "1"}, "bos_token_id='1' is not of type int"),
        ({"tokenizer.ggml.merges": [1]}, "merges is not a list of str"),
        ({"tokenizer.ggml.tokens": [1]}, "tokens is not a list of str"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer of kind llama"),
        ({"tokenizer.ggml.model": None}, "holds no tokenizer"),
        ({"tokenizer.ggml.pre": "deepseek"}, "pre='deepseek'"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "2 types for 8 tokens"),
        ({"tokenizer.ggml.merges": ["a b c"]}, "a merge is not of two pieces"),
        ({"tokenizer.ggml.merges": None}, "tokens or merges are not lists"),
        (
            {
                "tokenizer.ggml.tokens": [str(i) for i in range(65)],
                "tokenizer.ggml.token_type": None,
            },
            "the tokenizer has 65 ids, but the embedding has 64 rows",
        ),
    ],
)
def test_what_the_metadata_cannot_mean_is_named(tmp_path: Path, changes, part):
    path = write(tmp_path / "model.gguf", *read_source("llama"), changes)
    with pytest.raises(ModelError) as caught:
        import_checkpoint(path, tmp_path / "target")
    assert part in str(caught.value) and "\n" not in str(caught.value)
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.gguf"]


def test_a_quantisation_that_cannot_be_read_is_named(tmp_path: Path):
    config, tensors = read_source("llama")
    tensors["blk.1.attn_q.weight"] = tensors["blk.1.attn_q.weight"].astype(np.int32)
    path = write(tmp_path / "model.gguf", config, tensors)
    with pytest.raises(ModelError, match=r"blk\.1\.attn_q\.weight is quantised as I32"):
        import_checkpoint(path, tmp_path / "target")


def test_a_truncated_file_is_refused(llama: Path):
    data = llama.read_bytes()
    for keep in (0, 3, 8, 20, 100, 500, 1500, len(data) // 2, len(data) - 40_000):
        llama.write_bytes(data[:keep])
        with pytest.raises(ModelError, match="is not a whole GGUF file"):
            GGUFFile(llama)


def field(name: bytes, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + value


@pytest.mark.parametrize(
    ("version", "counts", "rest", "part"),
    [
        (99, (0, 0), b"", "version is 99"),
        (3 << 24, (0, 0), b"", "other byte order"),
        (3, (2**60, 0), b"", f"speaks of {2**60} tensors"),
        (3, (0, 1), struct.pack("<Q", 2**60), "ends within the header"),
        (3, (0, 1), field(b"a", 8, struct.pack("<Q", 2**60)), "ends within the header"),
        (3, (0, 1), field(b"a", 9, struct.pack("<IQ", 0, 2**60)), f"a list of {2**60} values"),
        (3, (0, 1), field(b"a", 9, struct.pack("<IQ", 4, 2**20)), "ends within the header"),
        (3, (0, 1), field(b"a", 9, struct.pack("<IQ", 9, 1) * 9000), "a value of kind 9"),
        (3, (0, 1), field(b"a", 77, b""), "a value of kind 77"),
        (3, (0, 1), field(b"general.alignment", 4, struct.pack("<I", 3)), "not a power of two"),
    ],
)
def test_lengths_beyond_the_file_cost_nothing(tmp_path: Path, version, counts, rest, part):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", version, *counts) + rest)
    with pytest.raises(ModelError, match=part):
        GGUFFile(path)


@pytest.mark.parametrize(
    ("shape", "kind", "offset", "part"),
    [
        ((8,), 0, 32, "beyond the end"),
        ((8,), 0, 2**64 - 32, "beyond the end"),  # in 64 bits it would come round
        ((8,), 0, 4, "overlaps another, or lies"),
        ((2**32, 2**32), 0, 0, "beyond the end"),
        ((0,), 0, 0, "has the shape"),
        ((8,), 8, 0, "not of blocks of 32"),
        ((8,), 99, 0, "unknown quantisation 99"),
        ((), 0, 0, "0 dimensions"),
        ((1,) * 5, 0, 0, "5 dimensions"),
    ],
)
def test_tensors_lie_within_the_file(tmp_path: Path, shape, kind, offset, part):
    path = tmp_path / "model.gguf"
    tensor = struct.pack("<Q1sI", 1, b"x", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape)
    data = b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + tensor + struct.pack("<IQ", kind, offset)
    path.write_bytes(data + bytes(-len(data) % 32 + 32))
    with pytest.raises(ModelError, match=part):
        GGUFFile(path)


def test_two_tensors_do_not_share_bytes(llama: Path):
    data = llama.read_bytes()
    name = b"output_norm.weight"
    place = data.index(name) + len(name) + 4 + 8 + 4  # dimensions, one length, kind
    llama.write_bytes(data[:place] + bytes(8) + data[place + 8 :])
    with pytest.raises(ModelError, match="overlaps another"):
        GGUFFile(llama)


def test_damaged_headers_are_refused_or_read(llama: Path):
    data = bytearray(llama.read_bytes())
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(150):
        damaged = data.copy()
        for position in rng.integers(4, 3000, 3):
            damaged[position] = rng.integers(256)
        llama.write_bytes(damaged)
        try:
            GGUFFile(llama)
        except ModelError:
            refused += 1
    assert refused > 20


def test_the_tokenizer_of_a_bpe_file(llama: Path, tmp_path: Path):
    import_checkpoint(llama, tmp_path / "target")
    spec = json.loads((tmp_path / "target" / "tokenizer.json").read_text())
    assert spec["model"]["vocab"] == {token: i for i, token in enumerate(TOKENS[:-1])}
    assert spec["model"]["merges"] == [["a", "b"]] and spec["normalizer"] == {"type": "NFC"}
    added = [(token["id"], token["content"], token["special"]) for token in spec["added_tokens"]]
    assert added == [(5, "<|end|>", True), (6, "<tool>", False)]
    config = json.loads((tmp_path / "target" / "tokenizer_config.json").read_text())
    assert config["eos_token"] == "<|end|>" and config["chat_template"] == "{{ messages }}"
    public = json.loads((tmp_path / "target" / "hf_config.json").read_text())
    assert public["eos_token_id"] == 5 and public["model_type"] == "llama"


def test_a_leading_token_is_kept(tmp_path: Path):
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": TYPES,
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.bos_token_id": 5,
        "tokenizer.ggml.add_bos_token": True,
    }
    write_tokenizer(metadata, "file", tmp_path)
    spec = json.loads((tmp_path / "tokenizer.json").read_text())
    assert spec["post_processor"]["single"][0] == {"SpecialToken": {"id": "<|end|>", "type_id": 0}}
    assert spec["model"]["ignore_merges"]


@pytest.mark.parametrize("index", [-1, 2**32 - 1, len(TOKENS)])
def test_a_control_id_of_no_token_is_none(tmp_path: Path, index: int):
    changes = {"tokenizer.ggml.tokens": TOKENS, "tokenizer.ggml.merges": []}
    ids = {"tokenizer.ggml.bos_token_id": index, "tokenizer.ggml.add_bos_token": True}
    names = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2"}
    write_tokenizer(changes | ids | names, "file", tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert "bos_token" not in config and "add_bos_token" not in config
    assert json.loads((tmp_path / "generation_config.json").read_text()) == {}


def test_tokens_spelt_alike_are_refused(tmp_path: Path):
    changes = {"tokenizer.ggml.tokens": [*TOKENS[:-2], "a", "[PAD]"]}
    path = write(tmp_path / "model.gguf", *read_source("llama"), changes)
    with pytest.raises(ModelError, match="two of its tokens are spelt alike"):
        import_checkpoint(path, tmp_path / "target")


def test_a_tokenizer_from_elsewhere_takes_the_place(tmp_path: Path):
    changes = {"tokenizer.ggml.model": "llama"}
    path = write(tmp_path / "model.gguf", *read_source("llama"), changes)
    import_checkpoint(path, tmp_path / "target", tokenizer=GOLDEN / "llama")
    given = (GOLDEN / "llama" / "tokenizer.json").read_bytes()
    assert (tmp_path / "target" / "tokenizer.json").read_bytes() == given
    assert read_config(tmp_path / "target").family == "llama"


def test_a_folder_of_gguf_files_says_what_to_name(llama: Path, tmp_path: Path):
    folder = tmp_path / "folder"
    folder.mkdir()
    shutil.copy(GOLDEN / "llama" / "config.json", folder)
    llama.rename(folder / "model.gguf")
    with pytest.raises(ModelError, match=r"holds model\.gguf; name that file itself"):
        import_checkpoint(folder, tmp_path / "target")
