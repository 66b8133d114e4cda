"""Root mean square normalisation for CPUs in C++: each row is read once, and is added to on the way. A row's result
depends on no other row."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxllm.pallas_kernels import native
from jaxllm.pallas_kernels.dispatch import UNPLACED, Placement
from jaxllm.pallas_kernels.gradients import with_gradient_of
from jaxllm.pallas_kernels.rms_norm import reference

DTYPES = ("float32", "bfloat16")


def supports(x: Array, added: Array | None, scale: Array) -> bool:
    """Whether the kernel is built and supports these dtypes."""
    dtypes = [array.dtype.name for array in (x, scale, added) if array is not None]
    same = added is None or (added.dtype == x.dtype and added.shape == x.shape)
    return same and set(dtypes) <= set(DTYPES) and native.is_built()


def rms_norm(
    x: Float[Array, "*t width"],
    added: Float[Array, "*t width"] | None,
    scale: Float[Array, " width"],
    *,
    eps: float,
    unit_offset: bool = False,
    scales_first: bool = False,
    fixed_order: bool = True,
    num_tokens: Int[Array, ""] | None = None,
    placement: Placement = UNPLACED,
) -> tuple[Float[Array, "*t width"], Float[Array, "*t width"]]:
    """See `reference.rms_norm`."""
    del fixed_order, placement  # it always is, on a CPU
    options = {"eps": eps, "unit_offset": unit_offset, "scales_first": scales_first}
    arrays = [x, scale] if added is None else [x, scale, added]
    kernel = partial(_rms_norm, num_tokens=num_tokens, **options)
    return with_gradient_of(partial(_by_xla, **options), kernel, num_tokens)(*arrays)


def _by_xla(x: Array, scale: Array, added: Array | None = None, **options: Any) -> tuple[Array, Array]:
    return reference.rms_norm(x, added, scale, **options)


def _rms_norm(
    x: Array, scale: Array, added: Array | None = None, *, eps: float, num_tokens: Array | None, **options: Any
) -> tuple[Array, Array]:
    flat = (math.prod(x.shape[:-1]), x.shape[-1])
    more = jnp.zeros((0, flat[1]), x.dtype) if added is None else added.reshape(flat)
    results = [jax.ShapeDtypeStruct(shape, x.dtype) for shape in (more.shape, flat)]
    used = native.num_rows(num_tokens, x.shape[:-1])
    call = native.ffi_call("jaxllm_rms_norm", results)
    total, y = call(x.reshape(flat), more, scale, used, eps=np.float32(eps), **options)
    return x if added is None else total.reshape(x.shape), y.reshape(x.shape)
