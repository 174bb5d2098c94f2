"""The shape of the transformer, and reading it back from a folder of weights. The `config.json` of
public checkpoints is read in `models.hf`.
"""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from models.errors import ModelError
from models.json_file import read_json

CONFIG_FILE = "config.json"
MAX_SIZE = 2**24  # of any one axis: larger is a damaged file
MAX_LAYERS = 4096

Family = Literal["spade", "llama", "qwen2", "qwen3", "qwen3_moe"]

PLAIN_KINDS: dict[Any, tuple[tuple[type, ...], str]] = {  # what JSON may hold for a field
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    bool: ((bool,), "true or false"),
}


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the context a model was first trained on."""

    kind: Literal["linear", "llama3"]  # all frequencies / factor, or the low ones alone
    factor: float  # how many times longer the context becomes
    low_freq_factor: float = 1.0  # llama3: original context / it is the wavelength that is scaled
    high_freq_factor: float = 4.0  # llama3: original context / it is the wavelength that is kept
    original_max_positions: int = 8192  # llama3: the context before scaling

    def __post_init__(self) -> None:
        if self.kind not in ("linear", "llama3"):
            raise ModelError(
                f"model.rope_scaling.kind={self.kind!r} is unknown; expected linear or llama3"
            )
        if not 1 <= self.factor < 1e6:
            raise ModelError(f"model.rope_scaling.factor={self.factor} must be 1 or more")
        if self.kind == "llama3" and not (
            0 < self.low_freq_factor < self.high_freq_factor and self.original_max_positions >= 1
        ):
            raise ModelError(
                f"model.rope_scaling.low_freq_factor={self.low_freq_factor} must be positive and "
                f"below high_freq_factor={self.high_freq_factor}, and original_max_positions="
                f"{self.original_max_positions} at least 1"
            )


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes of a decoder-only mixture-of-experts transformer; `num_experts=1` is a dense model."""

    family: Family = "spade"  # whose checkpoints it can hold; "spade" is our own small shape
    vocab_size: int = 4096  # pieces of the tokenizer, special ones included
    num_layers: int = 5  # decoder blocks
    embed: int = 192  # width of the residual stream
    num_heads: int = 6  # query heads
    num_kv_heads: int = 3  # key and value heads (grouped-query attention)
    head_dim: int = 32  # width of a head
    mlp: int = 256  # hidden width of one expert
    num_experts: int = 8  # experts in a layer
    experts_per_token: int = 2  # experts a token is routed to
    rope_theta: float = 10_000.0  # base of the rotary angles
    norm_eps: float = 1e-6  # epsilon of RMSNorm
    qk_norm: bool = False  # normalise queries and keys per head
    tied_head: bool = True  # the output head is the embedding table
    scale_embedding: bool = True  # token embeddings enter multiplied by the root of `embed`
    qkv_bias: bool = False  # queries, keys and values have a bias
    norm_topk_prob: bool = True  # the weights of a token's experts are made to sum to one
    rope_scaling: RopeScaling | None = None  # None leaves the rotary frequencies as they are
    max_positions: int = 32_768  # longest sequence the model is meant for

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "num_layers",
            "embed",
            "num_heads",
            "num_kv_heads",
            "mlp",
            "num_experts",
            "max_positions",
        ):
            value, most = getattr(self, name), MAX_LAYERS if name == "num_layers" else MAX_SIZE
            if not 1 <= value <= most:
                raise ModelError(f"model.{name}={value} must be from 1 to {most}")
        if not 2 <= self.head_dim <= MAX_SIZE or self.head_dim % 2:
            raise ModelError(
                f"model.head_dim={self.head_dim} must be even (rotary pairs); set "
                f"{self.head_dim + 1}"
            )
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"model.num_heads={self.num_heads} must divide by "
                f"model.num_kv_heads={self.num_kv_heads}; "
                "set num_kv_heads to a divisor of num_heads"
            )
        if not 1 <= self.experts_per_token <= self.num_experts:
            raise ModelError(
                f"model.experts_per_token={self.experts_per_token} must lie in "
                f"1..model.num_experts={self.num_experts}"
            )
        # Written so that NaN is refused.
        if not (0 < self.norm_eps < math.inf and 0 < self.rope_theta < math.inf):
            raise ModelError(
                f"model.norm_eps={self.norm_eps} and model.rope_theta={self.rope_theta} must "
                "be positive and finite"
            )


def from_dict(values: Any, where: str | Path) -> TransformerConfig:
    """Build the config that `dataclasses.asdict` gave; a field that is absent has its default."""
    if not isinstance(values, dict):
        raise ModelError(f"{where} holds {type(values).__name__}, not a JSON object; restore it")
    known = {field.name for field in dataclasses.fields(TransformerConfig)}
    if unknown := sorted(values.keys() - known):
        raise ModelError(
            f"{where} has fields that are not of a model of ours: {', '.join(unknown[:5])}; a "
            "public checkpoint is made one by `spade-jax convert`"
        )
    family = values.get("family", TransformerConfig.family)
    if family not in get_args(Family):
        raise ModelError(
            f"{where}: family={family!r} is unknown; expected one of {', '.join(get_args(Family))}"
        )
    values = dict(values)
    for field in dataclasses.fields(TransformerConfig):
        if field.name in values and field.type in PLAIN_KINDS:
            kinds, expected = PLAIN_KINDS[field.type]
            if type(values[field.name]) not in kinds:
                raise ModelError(f"{where}: {field.name}={values[field.name]!r} is not {expected}")
    try:
        if values.get("rope_scaling") is not None:
            values["rope_scaling"] = RopeScaling(**values["rope_scaling"])
        return TransformerConfig(**values)
    except TypeError as error:
        raise ModelError(f"{where} cannot be read ({error}); restore it") from error


def read_config(folder: str | Path) -> TransformerConfig:
    """Read the config of a folder of weights."""
    path = Path(folder) / CONFIG_FILE
    try:
        values = read_json(path)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{path} cannot be read ({error}); point to a folder of weights of ours"
        ) from error
    return from_dict(values, path)
