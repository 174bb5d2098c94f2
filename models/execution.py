"""How a model runs: the layout of its layers, number formats, kernels, rematerialisation and how
tokens travel.

None of it says which model it is, so none of it is stored with weights. `auto` is settled once, by
`models.backends.resolve`, from the devices; everything but `resolve` takes settled values only
(but for `transport`, which depends on the number of tokens too).
"""

import dataclasses
from dataclasses import dataclass
from typing import Literal

from models.errors import ModelError

Layers = Literal["auto", "unrolled", "scanned"]
Dtype = Literal["auto", "float32", "bfloat16"]
AttentionBackend = Literal["auto", "xla", "splash", "cudnn"]
ExpertsBackend = Literal["auto", "blocks", "megablox", "hopper", "triton"]
Transport = Literal["auto", "replicated", "gather", "ragged"]
Remat = Literal["auto", "none", "dots", "full"]

CHOICES: dict[str, tuple[str, ...]] = {
    "layers": ("auto", "unrolled", "scanned"),
    "compute_dtype": ("auto", "float32", "bfloat16"),
    "param_dtype": ("auto", "float32", "bfloat16"),
    "attention": ("auto", "xla", "splash", "cudnn"),
    "remat": ("auto", "none", "dots", "full"),
    "experts": ("auto", "blocks", "megablox", "hopper", "triton"),
    "transport": ("auto", "replicated", "gather", "ragged"),
}


@dataclass(frozen=True)
class Execution:
    """Choices for a platform, the same for sampler and learner; `auto` lets the devices decide."""

    # unrolled: a list of layers (auto on CPU); scanned: stacked weights, one compiled layer
    layers: Layers = "auto"
    # activations and products; norms, softmax, router, rotary angles and scores are float32 always
    compute_dtype: Dtype = "auto"
    param_dtype: Dtype = "auto"  # weights and optimiser moments of the learner; auto: float32
    attention: AttentionBackend = "auto"  # xla runs everywhere; splash on TPU, cudnn on NVIDIA
    # what the backward pass computes again: nothing, all but products with weights, or everything
    remat: Remat = "auto"
    # grouped products: blocks run everywhere; megablox on TPU, hopper and triton on NVIDIA
    experts: ExpertsBackend = "auto"
    # how tokens reach experts on other devices; auto: by their number, at each shape
    # (`models.moe.choose_transport`)
    transport: Transport = "auto"

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                raise ModelError(f"execution.{name}={value!r} must be one of {', '.join(choices)}")

    @property
    def settled(self) -> bool:
        """Whether nothing is left to the devices."""
        names = {field.name for field in dataclasses.fields(self)} - {"transport"}
        return all(getattr(self, name) != "auto" for name in names)


PLAIN = Execution("unrolled", "float32", "float32", "xla", "none", "blocks")
"""What runs everywhere: the choices on CPU."""
