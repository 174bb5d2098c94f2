"""What the ahead-of-time benchmark reads from the text of an executable."""

import jax
import jax.numpy as jnp

from benchmarks.hlo import kernels, largest_array
from models.grouped import grouped_matmul

TEXT = """
  %gmm = bf16[64,32]{1,0} custom-call(%a), custom_call_target="tpu_custom_call",
  %gmm = bf16[64,32]{1,0} custom-call(%a), custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/transpose(megablox_transposed)/jit(gmm)/pallas_call"}
  %gmm.2 = bf16[64,32]{1,0} custom-call(%a), custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/megablox_product/jit(gmm)/pallas_call"}
  %gmm.3 = bf16[64,32]{1,0} custom-call(%a), custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/megablox_product/jit(gmm)/pallas_call"}
  %splash_mha_dq_segmented.1 = bf16[64,32]{1,0} custom-call(%splash_mha_fwd_segmented.1), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
  }}, metadata={op_name="jit(f)/splash_mha_dq_segmented/pallas_call"}
  %s = pred[4,8,2]{1,0} custom-call(%a), custom_call_target="__cudnn$fmhaScaleBiasSoftmax", metadata={op_name="x"}
  %o = bf16[4]{0} custom-call(%a), custom_call_target="AllocateBuffer", metadata={op_name="megablox_outer"}
"""  # noqa: E501


def test_kernels_are_counted_by_name_and_other_calls_not():
    assert kernels(TEXT) == {
        "tpu": 1,
        "megablox_transposed": 1,
        "megablox_product": 2,
        "splash_mha_dq": 1,
        "cudnn_fwd": 1,
    }


def test_largest_array_counts_elements():
    assert largest_array(TEXT) == (2048, "bf16[64,32]")
    assert largest_array("no arrays") == (0, "none")


def test_dense_expansion_shows_in_the_largest_array():
    """Bare `ragged_dot` on a CPU holds each row once for each expert, the blocks do not."""
    tokens, experts, embed, mlp, chosen = 32, 16, 24, 40, 2
    shapes = (
        jax.ShapeDtypeStruct((tokens * chosen, embed), jnp.float32),
        jax.ShapeDtypeStruct((experts, embed, mlp), jnp.float32),
        jax.ShapeDtypeStruct((experts,), jnp.int32),
    )
    dense = tokens * experts * mlp

    def largest(function) -> int:
        return largest_array(jax.jit(function).lower(*shapes).compile().as_text())[0]

    assert largest(jax.lax.ragged_dot) > dense
    assert largest(grouped_matmul) < dense
