"""How a model runs: the layout of its layers, number formats, kernels, rematerialisation and how
tokens travel.

None of it says which model it is, so none of it is stored with weights. `auto` is settled once, by
`models.backends.resolve`, from the devices; everything but `resolve` takes settled values only
(but for `transport`, which depends on the number of tokens too).
"""

from dataclasses import dataclass
from typing import Literal

Layers = Literal["auto", "unrolled", "scanned"]
Dtype = Literal["auto", "float32", "bfloat16"]
AttentionBackend = Literal["auto", "xla", "splash", "cudnn"]
ExpertsBackend = Literal["auto", "blocks", "megablox", "hopper", "triton"]
Transport = Literal["auto", "replicated", "gather", "ragged"]
Remat = Literal["auto", "none", "dots", "full"]


@dataclass(frozen=True)
class Execution:
    """Choices for a platform, the same for sampler and learner; `auto` lets the devices decide."""

    # unrolled: a list of layers (auto on CPU); scanned: stacked weights, one compiled layer
    layers: Layers = "auto"
    # activations and products; norms, softmax, router, rotary angles and scores are float32 always
    compute_dtype: Dtype = "auto"
    # weights of the learner; auto: float32. bfloat16 is for weights that stay as they are, beneath
    # adapters: it rounds an update away
    param_dtype: Dtype = "auto"
    # xla runs everywhere; splash on TPU, cudnn on NVIDIA, each with the platform's kernel for pages
    attention: AttentionBackend = "auto"
    # what the backward pass computes again: nothing, all but products with weights, or everything
    remat: Remat = "auto"
    # grouped products: blocks run everywhere; megablox on TPU, hopper and triton on NVIDIA
    experts: ExpertsBackend = "auto"
    # how tokens reach experts on other devices; auto: by their number, at each shape
    # (`models.moe.choose_transport`)
    transport: Transport = "auto"


PLAIN = Execution("unrolled", "float32", "float32", "xla", "none", "blocks")
"""What runs everywhere: the choices on CPU."""
