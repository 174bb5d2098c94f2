"""How our parameters are made of the tensors of Hugging Face checkpoints, and taken apart again.

One table, used in both directions and by every reader. A group is what is stored together: each
layer, and the `outer` parameters around the layers. Values are never changed, only transposed,
split and laid side by side, so a round trip is exact to the bit.

    attention.query [embed, heads, head_dim]   self_attn.q_proj.weight [heads * head_dim, embed]
    moe.gate_up     [experts, embed, 2, mlp]   mlp.gate_proj, mlp.up_proj [mlp, embed], or both of
                                               every mlp.experts.E
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from models.config import TransformerConfig

OUTER = "outer"
"""Name of the group around the layers; layer i is the group `blocks.i`."""

Join = Callable[[Sequence[np.ndarray]], np.ndarray]
Split = Callable[[np.ndarray], list[np.ndarray]]


@dataclass(frozen=True)
class Tensor:
    """One parameter of ours and the public tensors, all of one shape, that it is made of."""

    name: str  # within its group, dotted
    shape: tuple[int, ...]
    parts: tuple[str, ...]  # names in a Hugging Face checkpoint
    part_shape: tuple[int, ...]
    join: Join
    split: Split


def group_names(config: TransformerConfig) -> list[str]:
    """Return the groups of a model in the order in which they are stored."""
    return [OUTER, *(f"blocks.{layer}" for layer in range(config.num_layers))]


def group(config: TransformerConfig, name: str) -> list[Tensor]:
    """Return the parameters of one group."""
    if name == OUTER:
        return _outer(config)
    layer = int(name.removeprefix("blocks."))
    prefix = f"model.layers.{layer}."
    return [*_attention(config, prefix), *_feed_forward(config, prefix)]


def all_tensors(config: TransformerConfig) -> Iterator[Tensor]:
    """Yield every parameter of a model."""
    for name in group_names(config):
        yield from group(config, name)


def _outer(config: TransformerConfig) -> list[Tensor]:
    table = (config.vocab_size, config.embed)
    tensors = [
        _same("embedding", "model.embed_tokens.weight", table),
        _same("final_norm.scale", "model.norm.weight", (config.embed,)),
    ]
    if not config.tied_head:
        tensors.append(_transposed("head", "lm_head.weight", table[::-1]))
    return tensors


def _attention(config: TransformerConfig, prefix: str) -> list[Tensor]:
    embed, heads, kv_heads = config.embed, config.num_heads, config.num_kv_heads
    dim, attention = config.head_dim, f"{prefix}self_attn."
    sizes = {"query": ("q", heads), "key": ("k", kv_heads), "value": ("v", kv_heads)}
    tensors = [
        _same("attention_norm.scale", f"{prefix}input_layernorm.weight", (embed,)),
        _same("moe_norm.scale", f"{prefix}post_attention_layernorm.weight", (embed,)),
    ]
    for name, (letter, count) in sizes.items():
        public = f"{attention}{letter}_proj"
        tensors.append(_heads_out(f"attention.{name}", f"{public}.weight", (embed, count, dim)))
        if config.qkv_bias:
            shape = (count, dim)
            tensors.append(_reshaped(f"attention.{name}_bias", f"{public}.bias", shape))
    shape = (heads, dim, embed)
    tensors.append(_heads_in("attention.output", f"{attention}o_proj.weight", shape))
    if config.qk_norm:
        tensors.append(_same("attention.query_norm.scale", f"{attention}q_norm.weight", (dim,)))
        tensors.append(_same("attention.key_norm.scale", f"{attention}k_norm.weight", (dim,)))
    return tensors


def _feed_forward(config: TransformerConfig, prefix: str) -> list[Tensor]:
    embed, mlp, experts = config.embed, config.mlp, config.num_experts
    if experts == 1:
        owners = [f"{prefix}mlp."]
    else:
        owners = [f"{prefix}mlp.experts.{expert}." for expert in range(experts)]
    gates = tuple(f"{owner}{name}_proj.weight" for owner in owners for name in ("gate", "up"))
    downs = tuple(f"{owner}down_proj.weight" for owner in owners)
    shape = (experts, embed, 2, mlp)

    def join(parts: Sequence[np.ndarray]) -> np.ndarray:
        whole = np.empty(shape, parts[0].dtype)
        for index, part in enumerate(parts):
            whole[index // 2, :, index % 2] = part.T
        return whole

    def split(whole: np.ndarray) -> list[np.ndarray]:
        return [whole[index // 2, :, index % 2].T for index in range(2 * experts)]

    def join_down(parts: Sequence[np.ndarray]) -> np.ndarray:
        if len(parts) == 1:
            return parts[0].T[None]
        whole = np.empty((experts, mlp, embed), parts[0].dtype)
        for expert, part in enumerate(parts):
            whole[expert] = part.T
        return whole

    tensors = [
        Tensor("moe.gate_up", shape, gates, (mlp, embed), join, split),
        Tensor(
            "moe.down",
            (experts, mlp, embed),
            downs,
            (embed, mlp),
            join_down,
            lambda whole: [whole[expert].T for expert in range(experts)],
        ),
    ]
    if experts > 1:
        tensors.append(_transposed("moe.router", f"{prefix}mlp.gate.weight", (embed, experts)))
    return tensors


def _one(
    name: str,
    public: str,
    shape: tuple[int, ...],
    public_shape: tuple[int, ...],
    join: Callable[[np.ndarray], np.ndarray],
    split: Callable[[np.ndarray], np.ndarray],
) -> Tensor:
    """Describe a parameter that is a single public tensor."""
    return Tensor(
        name,
        shape,
        (public,),
        public_shape,
        lambda parts: join(parts[0]),
        lambda whole: [split(whole)],
    )


def _same(name: str, public: str, shape: tuple[int, ...]) -> Tensor:
    return _one(name, public, shape, shape, lambda x: x, lambda x: x)


def _transposed(name: str, public: str, shape: tuple[int, ...]) -> Tensor:
    return _one(name, public, shape, shape[::-1], lambda x: x.T, lambda x: x.T)


def _reshaped(name: str, public: str, shape: tuple[int, int]) -> Tensor:
    flat = (shape[0] * shape[1],)
    return _one(name, public, shape, flat, lambda x: x.reshape(shape), lambda x: x.reshape(flat))


def _heads_out(name: str, public: str, shape: tuple[int, int, int]) -> Tensor:
    embed, heads, dim = shape
    flat = (heads * dim, embed)
    return _one(
        name,
        public,
        shape,
        flat,
        lambda x: x.reshape(heads, dim, embed).transpose(2, 0, 1),
        lambda x: x.transpose(1, 2, 0).reshape(flat),
    )


def _heads_in(name: str, public: str, shape: tuple[int, int, int]) -> Tensor:
    heads, dim, embed = shape
    flat = (embed, heads * dim)
    return _one(
        name,
        public,
        shape,
        flat,
        lambda x: x.reshape(embed, heads, dim).transpose(1, 2, 0),
        lambda x: x.transpose(2, 0, 1).reshape(flat),
    )
