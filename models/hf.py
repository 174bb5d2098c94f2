"""The `config.json` of Hugging Face checkpoints, and the table of model families.

What a file says about the computation is honoured or refused by name: a model that is almost the
one that was asked for is never built. Tensors are in `models.tensors`. Attention sinks, sliding
windows and hybrid layers are not here; BUILD.md says where they would go.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from models.config import MAX_LAYERS, MAX_SIZE, Family, RopeScaling, TransformerConfig
from models.errors import ModelError

ROPE_KEYS = {
    *("rope_type", "type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor"),
    *("original_max_position_embeddings", "partial_rotary_factor"),
}


@dataclass(frozen=True)
class FamilyTraits:
    """What sets a family apart: how its files name things, and defaults of transformers."""

    architecture: str  # class in config.json "architectures"
    gguf: str  # general.architecture of GGUF files
    qkv_bias: bool = False  # queries, keys and values always have a bias
    qk_norm: bool = False  # queries and keys are normalised per head
    experts: bool = False  # feed-forward layers are routed experts
    windows: bool = False  # config.json may ask for sliding windows
    gguf_permuted: bool = False  # GGUF files hold query and key rows in interleaved order
    defaults: Mapping[str, Any] = field(default_factory=dict)  # where config.json is silent


FAMILIES: dict[Family, FamilyTraits] = {
    "llama": FamilyTraits(
        "LlamaForCausalLM",
        "llama",
        gguf_permuted=True,
        defaults={"max_position_embeddings": 2048},
    ),
    "qwen2": FamilyTraits("Qwen2ForCausalLM", "qwen2", qkv_bias=True, windows=True),
    "qwen3": FamilyTraits(
        "Qwen3ForCausalLM", "qwen3", qk_norm=True, windows=True, defaults={"head_dim": 128}
    ),
    "qwen3_moe": FamilyTraits(
        "Qwen3MoeForCausalLM",
        "qwen3moe",
        qk_norm=True,
        experts=True,
        windows=True,
        # Every layer slides where it is asked for: there is no max_window_layers.
        defaults={"max_window_layers": 0},
    ),
}

# For all families; a family's own come first.
DEFAULTS = {"max_position_embeddings": 32_768, "rms_norm_eps": 1e-6, "max_window_layers": 28}

REFUSED = {  # key -> the value that changes nothing
    "attention_bias": False,
    "mlp_bias": False,
    "rope_interleaved": False,
    "partial_rotary_factor": 1.0,
    "hidden_act": "silu",
    "quantization_config": None,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "pruned_heads": {},
}
IGNORED = {"qwen2": ("attention_bias",)}  # keys the family's code in transformers does not read


def family_of(model_type: Any, where: str) -> Family:
    """Return the family that a `model_type` names."""
    for family in FAMILIES:
        if family == model_type:
            return family
    raise ModelError(
        f"{where}: the architecture {model_type!r} is not supported; expected one of "
        f"{', '.join(FAMILIES)}"
    )


def from_hf(values: Any, where: str) -> TransformerConfig:
    """Build the config of a Hugging Face `config.json`.

    Args:
        where: the file, for messages.
    """
    if not isinstance(values, dict):
        raise ModelError(f"{where} holds {type(values).__name__}, expected a JSON object")
    family = family_of(values.get("model_type"), where)
    traits = FAMILIES[family]
    reader = _Reader(values, {**DEFAULTS, **traits.defaults}, where)
    architectures = values.get("architectures")
    if architectures is not None and architectures != [traits.architecture]:
        raise reader.refuse("architectures", f"expected [{traits.architecture!r}]")
    for key, harmless in REFUSED.items():
        value = values.get(key)
        if key not in IGNORED.get(family, ()) and value is not None and value != harmless:
            raise reader.refuse(key, f"only {harmless!r} is supported")
    num_layers = reader.size("num_hidden_layers", MAX_LAYERS)
    _check_windows(reader, traits, num_layers)
    embed, num_heads = reader.size("hidden_size"), reader.size("num_attention_heads")
    if reader.get("head_dim") is None and embed % num_heads:
        raise reader.refuse("head_dim", f"{embed=} does not divide by {num_heads=}")
    num_kv_heads = num_heads
    if family != "llama" or values.get("num_key_value_heads") is not None:
        num_kv_heads = reader.size("num_key_value_heads")
    theta, scaling = _rope(reader)
    tied = values.get("tie_word_embeddings", False)
    if not isinstance(tied, bool):
        raise reader.refuse("tie_word_embeddings", "expected true or false")
    return TransformerConfig(
        family=family,
        vocab_size=reader.size("vocab_size"),
        num_layers=num_layers,
        embed=embed,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=(
            embed // num_heads if reader.get("head_dim") is None else reader.size("head_dim")
        ),
        mlp=reader.size("moe_intermediate_size" if traits.experts else "intermediate_size"),
        rope_theta=theta,
        norm_eps=reader.number("rms_norm_eps"),
        qk_norm=traits.qk_norm,
        tied_head=tied,
        scale_embedding=False,
        qkv_bias=traits.qkv_bias,
        rope_scaling=scaling,
        max_positions=reader.size("max_position_embeddings"),
        **_experts(reader, traits),
    )


class _Reader:
    """Typed access to the keys of one file; a mistake names the key, its value and the file."""

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any], where: str) -> None:
        self.values, self.defaults, self.where = values, defaults, where

    def get(self, key: str) -> Any:
        return self.values.get(key, self.defaults.get(key))

    def refuse(self, key: str, reason: str) -> ModelError:
        return ModelError(f"{self.where}: {key}={self.get(key)!r} is not supported; {reason}")

    def size(self, key: str, most: int = MAX_SIZE) -> int:
        value = self.get(key)
        if type(value) is not int or not 1 <= value <= most:
            raise self.refuse(key, f"expected a whole number from 1 to {most}")
        return value

    def number(self, key: str) -> float:
        value = self.get(key)
        if type(value) not in (int, float) or not 0 < value < 1e12:
            raise self.refuse(key, "expected a positive number")
        return float(value)


def _experts(reader: _Reader, traits: FamilyTraits) -> dict[str, Any]:
    if not traits.experts:
        return {"num_experts": 1, "experts_per_token": 1}
    name = "num_local_experts" if "num_local_experts" in reader.values else "num_experts"
    num_experts, chosen = reader.size(name, 2**16), reader.size("num_experts_per_tok", 2**16)
    normed = reader.values.get("norm_topk_prob", False)
    if not isinstance(normed, bool):
        raise reader.refuse("norm_topk_prob", "expected true or false")
    if num_experts == 1 or (chosen == 1 and normed):
        raise reader.refuse(
            "num_experts_per_tok", "a single expert of weight one leaves the router no gradient"
        )
    return {
        "num_experts": num_experts,
        "experts_per_token": chosen,
        "norm_topk_prob": normed,
    }


def _check_windows(reader: _Reader, traits: FamilyTraits, num_layers: int) -> None:
    """Refuse sliding windows that some layer would use."""
    layer_types = reader.get("layer_types")
    if layer_types is not None and layer_types != ["full_attention"] * num_layers:
        raise reader.refuse("layer_types", 'only "full_attention" in every layer is supported')
    if not traits.windows or not reader.get("use_sliding_window"):
        return
    if layer_types is None and reader.values.get("sliding_window", 4096) is not None:
        first = reader.get("max_window_layers")
        if type(first) is not int or first < num_layers:
            raise reader.refuse("use_sliding_window", "sliding windows are not supported")


def _rope(reader: _Reader) -> tuple[float, RopeScaling | None]:
    """Return base and scaling; newer files hold both in `rope_parameters`."""
    new, old = reader.get("rope_parameters") or {}, reader.get("rope_scaling") or {}
    if new and old and new != old:
        raise reader.refuse("rope_scaling", "it differs from rope_parameters; remove one of them")
    values = new or old
    if not isinstance(values, dict) or any(isinstance(v, dict) for v in values.values()):
        raise reader.refuse("rope_parameters", "expected one flat object for all layers")
    theta, inner = reader.values.get("rope_theta"), values.get("rope_theta")
    if theta is not None and inner is not None and theta != inner:
        raise reader.refuse("rope_theta", f"rope_parameters say {inner!r}; remove one of them")
    reader = _Reader(
        {"rope_theta": reader.values.get("rope_theta", 10_000.0), **values}, {}, reader.where
    )
    if unknown := sorted(values.keys() - ROPE_KEYS):
        raise reader.refuse(unknown[0], "this key of rope_scaling is unknown")
    if reader.values.get("partial_rotary_factor", 1.0) != 1.0:
        raise reader.refuse("partial_rotary_factor", "only 1.0 is supported")
    theta = reader.number("rope_theta")
    kind = values.get("rope_type", values.get("type", "default"))
    match kind:
        case "default":
            return theta, None
        case "linear":
            return theta, RopeScaling("linear", reader.number("factor"))
        case "llama3":
            scaling = RopeScaling(
                "llama3",
                reader.number("factor"),
                reader.number("low_freq_factor"),
                reader.number("high_freq_factor"),
                reader.size("original_max_position_embeddings"),
            )
            return theta, scaling
    raise ModelError(
        f"{reader.where}: the rope scaling {kind!r} is not supported; expected default, linear or "
        "llama3 (yarn in a Qwen config is an option for long contexts: without it the model is the "
        "one that was trained)"
    )


def to_hf(config: TransformerConfig) -> dict[str, Any]:
    """Return the `config.json` that transformers reads; the inverse of `from_hf`."""
    if config.family not in FAMILIES:
        raise ModelError(
            f"model.family={config.family} has no Hugging Face form; expected one of "
            f"{', '.join(FAMILIES)}"
        )
    traits = FAMILIES[config.family]
    scaling = config.rope_scaling
    values: dict[str, Any] = {
        "architectures": [traits.architecture],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed,
        "intermediate_size": config.mlp,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "tie_word_embeddings": config.tied_head,
    }
    if scaling is not None:
        values["rope_scaling"] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling is not None and scaling.kind == "llama3":
        values["rope_scaling"] |= {
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_positions,
        }
    if not traits.qkv_bias:
        values["attention_bias"] = False
    if traits.windows:
        values |= {"use_sliding_window": False, "sliding_window": None}
    if traits.experts:
        values |= {
            "moe_intermediate_size": config.mlp,
            "num_experts": config.num_experts,
            "num_experts_per_tok": config.experts_per_token,
            "norm_topk_prob": config.norm_topk_prob,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    return values
