"""GGUF files as a Hugging Face checkpoint: config, tensors and tokenizer under their public names.

Quantised tensors are dequantised to float32, which is what the file says the model is; float16,
bfloat16 and float32 stay as they are. `llama` files store query and key rows interleaved for their
rotary kernel; that is undone. Files split into several parts are not here.
"""

import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import gguf
import jax.numpy as jnp
import numpy as np

from models.config import Family, RopeScaling, TransformerConfig
from models.errors import ModelError
from models.gguf_header import check_header, check_kinds
from models.hf import FAMILIES, from_hf, to_hf
from models.layers import rotary_frequencies

ROWS = 4096  # rows dequantised at a time; the package makes temporaries several times as large

OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_q.bias": "self_attn.q_proj.bias",
    "attn_k.bias": "self_attn.k_proj.bias",
    "attn_v.bias": "self_attn.v_proj.bias",
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    "ffn_gate_inp.weight": "mlp.gate.weight",
}
EXPERTS = {
    "ffn_gate_exps.weight": "gate",
    "ffn_up_exps.weight": "up",
    "ffn_down_exps.weight": "down",
}
ROPE_FACTORS = "rope_freqs.weight"  # how llama3 scaling is told, in place of its settings


class GGUFFile:
    """The tensors of one GGUF file under their Hugging Face names."""

    def __init__(self, path: Path) -> None:
        self.where = str(path)
        self.metadata, tensors = _read(path)
        self.config, self.hf_config = self._config(tensors)
        self._tensors: dict[str, tuple[Any, int | None]] = {}
        for tensor in tensors.values():
            if tensor.name != ROPE_FACTORS:
                for name, expert in self._public(tensor):
                    self._tensors[name] = (tensor, expert)

    def names(self) -> Iterable[str]:
        """Return the names of all tensors."""
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, as Hugging Face has it."""
        tensor, expert = self._tensors[name]
        shape = tuple(int(size) for size in reversed(tensor.shape))
        return shape if expert is None else shape[1:]

    def dtype(self, name: str) -> np.dtype:
        """Return the dtype that `read` gives."""
        kind = self._tensors[name][0].tensor_type.name
        plain = {"F16": np.dtype(np.float16), "BF16": np.dtype(jnp.bfloat16)}
        return plain.get(kind, np.dtype(np.float32))

    def read(self, name: str) -> np.ndarray:
        """Return a tensor: a view of the mapped file, or new float32 values."""
        tensor, expert = self._tensors[name]
        data = tensor.data if expert is None else tensor.data[expert]
        kind = tensor.tensor_type.name
        if kind in ("F32", "F16"):
            values = np.asarray(data)
        elif kind == "BF16":
            values = np.asarray(data).view(jnp.bfloat16)
        else:
            values = self._dequantise(data, tensor, self.shape(name))
        values = values.reshape(self.shape(name))
        config = self.config
        if FAMILIES[config.family].gguf_permuted and ".self_attn." in name:
            if ".q_proj." in name:
                return _interleaved_to_half(values, config.num_heads)
            if ".k_proj." in name:
                return _interleaved_to_half(values, config.num_kv_heads)
        return values

    def _dequantise(self, data: np.ndarray, tensor: Any, shape: tuple[int, ...]) -> np.ndarray:
        rows = data.reshape(-1, data.shape[-1])
        result = np.empty((rows.shape[0], shape[-1]), np.float32)
        for start in range(0, rows.shape[0], ROWS):
            block = rows[start : start + ROWS]
            result[start : start + ROWS] = gguf.dequantize(block, tensor.tensor_type)
        return result

    def _public(self, tensor: Any) -> list[tuple[str, int | None]]:
        """Return the public names of a tensor; one of all experts has a name for each of them."""
        self._check_readable(tensor)
        if tensor.name in OUTER:
            return [(OUTER[tensor.name], None)]
        match = re.fullmatch(r"blk\.(\d+)\.(.+)", tensor.name)
        layer, rest = match.groups() if match else ("", "")
        prefix = f"model.layers.{layer}."
        if rest in LAYER:
            return [(prefix + LAYER[rest], None)]
        if rest in EXPERTS and len(tensor.shape) == 3 and tensor.shape[2] <= 2**16:
            return [
                (f"{prefix}mlp.experts.{expert}.{EXPERTS[rest]}_proj.weight", expert)
                for expert in range(int(tensor.shape[2]))
            ]
        return [(tensor.name, None)]  # named as it is among what is not expected

    def _check_readable(self, tensor: Any) -> None:
        """Refuse a quantisation that the package cannot undo, before anything is written."""
        kind = tensor.tensor_type
        if kind.name in ("F32", "F16", "BF16"):
            return
        _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        try:
            gguf.dequantize(np.zeros((1, block_bytes), np.uint8), kind)
        except (NotImplementedError, KeyError, ValueError) as error:
            raise ModelError(
                f"{self.where}: {tensor.name} is quantised as {kind.name}, which cannot be read "
                f"({error or type(error).__name__}); take a file with another quantisation, such "
                "as Q8_0 or Q4_K_M"
            ) from error

    def _config(self, tensors: dict[str, Any]) -> tuple[TransformerConfig, dict[str, Any]]:
        """Return our config and the Hugging Face one it comes from."""
        architecture = self.metadata.get("general.architecture")
        families: dict[Any, Family] = {traits.gguf: name for name, traits in FAMILIES.items()}
        if architecture not in families:
            raise ModelError(
                f"{self.where}: the architecture {architecture!r} is not supported; expected one "
                f"of {', '.join(families)}"
            )
        family = families[architecture]

        def get(key: str, default: Any = None) -> Any:
            return self.metadata.get(f"{architecture}.{key}", default)

        heads, embed = get("attention.head_count"), get("embedding_length")
        if type(heads) is not int or type(embed) is not int or heads < 1:
            raise ModelError(
                f"{self.where}: attention.head_count={heads!r} and embedding_length={embed!r} are "
                "not whole numbers above 0; download the file again"
            )
        head_dim = get("attention.key_length", embed // heads)
        for key in ("attention.value_length", "rope.dimension_count"):
            if get(key, head_dim) != head_dim:
                raise ModelError(
                    f"{self.where}: {architecture}.{key}={get(key)} is not supported; expected the "
                    f"head's size, {head_dim}"
                )
        if get("attention.sliding_window"):
            raise ModelError(
                f"{self.where}: {architecture}.attention.sliding_window="
                f"{get('attention.sliding_window')} is not supported; only full attention is"
            )
        table = tensors.get("token_embd.weight")
        values = {
            "model_type": family,
            "vocab_size": int(table.shape[1]) if table is not None else None,
            "hidden_size": embed,
            "num_hidden_layers": get("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": get("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "intermediate_size": get("feed_forward_length"),
            "moe_intermediate_size": get("expert_feed_forward_length"),
            "num_experts_per_tok": get("expert_used_count"),
            "num_experts": get("expert_count"),
            "norm_topk_prob": bool(get("expert_weights_norm", True)),
            "max_position_embeddings": get("context_length"),
            "rms_norm_eps": _shortest(get("attention.layer_norm_rms_epsilon", 1e-6)),
            "rope_theta": _shortest(get("rope.freq_base", 10_000.0)),
            "tie_word_embeddings": "output.weight" not in tensors,
        }
        if not FAMILIES[family].experts and values["num_experts"]:
            raise ModelError(f"{self.where}: {architecture} with experts is not supported")
        if (kind := get("rope.scaling.type", "none")) != "none":
            values["rope_scaling"] = {
                "rope_type": kind,
                "factor": _shortest(get("rope.scaling.factor", 1.0)),
            }
        config = from_hf(values, self.where)
        if ROPE_FACTORS in tensors:
            scaling = self._llama3(config, np.asarray(tensors[ROPE_FACTORS].data))
            values["rope_scaling"] = scaling
            config = from_hf(values, self.where)
        hf_config = to_hf(config)
        for name in ("bos", "eos", "padding"):
            token = self.metadata.get(f"tokenizer.ggml.{name}_token_id")
            if token is not None and 0 <= token < config.vocab_size:  # -1 stands for none
                hf_config[f"{name.replace('padding', 'pad')}_token_id"] = token
        return config, hf_config

    def _llama3(self, config: TransformerConfig, factors: np.ndarray) -> dict[str, Any]:
        """Find the llama3 settings that give the factors; their values are those of Llama 3.1-3.3.

        The file holds what each frequency is divided by, and not the settings.
        """
        factor = round(float(factors.max()), 3) if factors.size else 0.0
        if factor >= 1:
            scaling = RopeScaling("llama3", factor, 1.0, 4.0, 8192)
            plain = rotary_frequencies(config.head_dim, config.rope_theta)
            scaled = rotary_frequencies(config.head_dim, config.rope_theta, scaling)
            if factors.shape == plain.shape and np.allclose(plain / scaled, factors, rtol=1e-4):
                return {
                    "rope_type": "llama3",
                    "factor": factor,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8192,
                }
        raise ModelError(
            f"{self.where}: {ROPE_FACTORS} are not the factors of Llama 3 scaling; this rope "
            "scaling is not supported"
        )


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the metadata as plain values, and the tensors by name."""
    check_header(path)
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            reader = gguf.GGUFReader(path)
            metadata = {name: field.contents() for name, field in reader.fields.items()}
    except (
        ValueError,
        KeyError,
        IndexError,
        TypeError,
        OverflowError,
        MemoryError,
        OSError,
    ) as error:
        raise ModelError(
            f"{path} is not a whole GGUF file ({type(error).__name__}: {error}); download it again"
        ) from error
    check_kinds(metadata, str(path))
    parts = metadata.get("split.count", 0)
    if parts > 1:
        raise ModelError(
            f"{path} is one of {parts} parts; join them first (llama-gguf-split --merge)"
        )
    return metadata, {tensor.name: tensor for tensor in reader.tensors}


def _interleaved_to_half(rows: np.ndarray, heads: int) -> np.ndarray:
    """Reorder the rows of each head from pairs (2i, 2i + 1) to pairs (i, i + head_dim / 2)."""
    shape = (heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return rows.reshape(shape).swapaxes(1, 2).reshape(rows.shape)


def _shortest(value: Any) -> Any:
    """Return the shortest decimal of a float32: 1e-05 and not 9.999999747378752e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value
