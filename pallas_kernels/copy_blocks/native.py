"""Copies of blocks in C++: the real blocks only, with all cores."""

from typing import Any

import jax
from jaxtyping import Array, Int, Shaped

from jaxllm.pallas_kernels import native


def supports(*call: Any) -> bool:
    """Whether the kernel is built; it copies any blocks."""
    return native.is_built()


def copy_blocks(pool: Shaped[Array, "blocks ..."], moves: Int[Array, "2 n"]) -> Shaped[Array, "blocks ..."]:
    """See `reference.copy_blocks`."""
    result = jax.ShapeDtypeStruct(pool.shape, pool.dtype)
    return native.ffi_call("jaxllm_copy_blocks", result, input_output_aliases={0: 0})(pool, moves)
