"""Zeros that the system makes of a page when it is first written: filling a gigabyte takes a second at the start."""

from collections.abc import Sequence
from typing import Any

import jax
from jaxtyping import Array, Shaped

from jaxllm.pallas_kernels import native


def supports(*call: Any) -> bool:
    """Whether the kernel is built; it makes any array."""
    return native.is_built()


def zeros(shape: Sequence[int], dtype: Any) -> Shaped[Array, "..."]:
    """See `reference.zeros`."""
    return native.ffi_call("jaxllm_zeros", jax.ShapeDtypeStruct(shape, dtype))()
