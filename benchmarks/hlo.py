"""What a compiled executable holds, read from its text: kernels, and the largest of its arrays."""

import math
import re
from collections import Counter

KERNEL_CALLS = {  # of custom calls, those that are a kernel of ours or a library's attention
    "tpu_custom_call": "tpu",
    "__gpu$xla.gpu.triton": "triton",
    "mosaic_gpu_v2": "mosaic",
    "__cudnn$fmhaScaleBiasSoftmax": "cudnn_fwd",
    "__cudnn$fmhaScaleBiasSoftmaxBackward": "cudnn_bwd",
}
NAMES = re.compile(
    r"((?:megablox|hopper|triton)_(?:product|transposed|outer)|splash_mha_(?:fwd|dq|dkv)"
    r"|(?:ragged_)?paged_attention)"
)
CALL = re.compile(r'custom_call_target="([^"]+)"')
OP_NAME = re.compile(r'op_name="([^"]*)"')
ARRAY = re.compile(r"\b(?:pred|[suf]\d+|bf16|f8\w+)\[([\d,]+)\]")


def kernels(text: str) -> Counter[str]:
    """Count the kernels by name; those of another origin by what kind of call they are."""
    found: Counter[str] = Counter()
    for line in text.splitlines():
        call = CALL.search(line)
        if call is None or call[1] not in KERNEL_CALLS:
            continue
        # Attributes of several lines may part an instruction from its op_name.
        op_name = OP_NAME.search(line)
        names = NAMES.findall(f"{line.split(' = ')[0]} {op_name[1] if op_name else ''}")
        found[names[-1] if names else KERNEL_CALLS[call[1]]] += 1
    return found


def largest_array(text: str) -> tuple[int, str]:
    """Return the number of elements of the largest array that any instruction names, and it."""
    shapes = {match[0]: match[1] for match in ARRAY.finditer(text)}
    sizes = ((math.prod(map(int, dims.split(","))), name) for name, dims in shapes.items())
    return max(sizes, default=(0, "none"))
