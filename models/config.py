"""The shape of the transformer. Reading Hugging Face `config.json` files is deliberately not here
yet.
"""

from dataclasses import dataclass

from models.errors import ModelError


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes of a decoder-only mixture-of-experts transformer; `num_experts=1` is a dense model."""

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

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "num_layers",
            "embed",
            "num_heads",
            "num_kv_heads",
            "mlp",
            "num_experts",
        ):
            if getattr(self, name) < 1:
                raise ModelError(f"model.{name}={getattr(self, name)} must be at least 1")
        if self.head_dim < 2 or self.head_dim % 2:
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
        if self.norm_eps <= 0 or self.rope_theta <= 0:
            raise ModelError(
                f"model.norm_eps={self.norm_eps} and model.rope_theta={self.rope_theta} must "
                f"be positive"
            )
