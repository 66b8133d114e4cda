"""Products with a dense weight that lies in the order in which a CPU reads it: in panels of 32 outputs, each with all
of its inputs one after the other. In C++ for CPUs alone."""

import ctypes
import math
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxllm.pallas_kernels import native
from jaxllm.pallas_kernels.gradients import with_gradient_of
from jaxllm.pallas_kernels.matmul import reference

PANEL = 32  # outputs
_MOST_THREADS = 16
_TOGETHER = {"float32": 1, "float16": 1, "bfloat16": 2}  # inputs of an output that lie side by side


def fits(inputs: int, outputs: int, dtype: Any) -> bool:
    """Whether such a weight can lie in panels."""
    together = _TOGETHER.get(jnp.dtype(dtype).name)
    return together is not None and outputs % PANEL == 0 and inputs % together == 0


def panels_shape(inputs: int, outputs: int, dtype: Any) -> tuple[int, ...]:
    """Of the panels of a matrix: `[panels, inputs, 32]`, but in bfloat16 `[panels, pairs of inputs, 32, 2]`."""
    together = _TOGETHER[jnp.dtype(dtype).name]
    return outputs // PANEL, inputs // together, PANEL, *(() if together == 1 else (together,))


def put_in_panels(weight: np.ndarray, panels: np.ndarray) -> None:
    """A weight `[..., inputs, outputs]` of the host into `panels`, `[..., *panels_shape]`."""
    *lead, inputs, outputs = weight.shape
    assert panels.shape == (*lead, *panels_shape(inputs, outputs, weight.dtype)) and panels.dtype == weight.dtype
    weight = np.ascontiguousarray(weight)
    addresses = (ctypes.c_void_p(array.ctypes.data) for array in (weight, panels))
    sizes = (ctypes.c_int64(size) for size in (math.prod(lead), inputs, outputs))
    by_pairs, threads = _TOGETHER[weight.dtype.name] > 1, min(_MOST_THREADS, os.cpu_count() or 1)
    counts = (ctypes.c_int32(count) for count in (weight.itemsize, by_pairs, threads))
    native.load().jaxllm_put_in_panels(*addresses, *sizes, *counts)


def from_panels(panels: Float[Array, "..."]) -> Float[Array, "*lead inputs outputs"]:
    """The weight that lies in `panels`, `[..., *panels_shape]`."""
    together = _TOGETHER[panels.dtype.name]
    *lead, num, rows, _ = panels.shape if together == 1 else panels.shape[:-1]
    split = jnp.moveaxis(panels.reshape(*lead, num, rows, PANEL, together), -1, -2)
    return jnp.moveaxis(split, len(lead), -2).reshape(*lead, rows * together, num * PANEL)


def columns(panels: Float[Array, "panels units ..."], ids: Int[Array, " n"]) -> Float[Array, "inputs n"]:
    """The weight of these outputs, in float32."""
    wanted = from_panels(panels[ids // PANEL])  # of each a panel
    at = jnp.arange(len(ids), dtype=ids.dtype) * PANEL + ids % PANEL
    return wanted[:, at].astype(jnp.float32)


def panel_product(
    x: Float[Array, "..."],
    panels: Float[Array, "panels units ..."],
    *,
    num_inputs: int,
    outputs: tuple[int, ...],
    out_dtype: Any = None,
    num_tokens: Int[Array, ""] | None = None,
    batch_invariant: bool = False,
) -> Float[Array, "..."]:
    """`x[..., *inputs]`, summed over its last `num_inputs` axes with a weight in panels: `[..., *outputs]`, what
    `matmul.native` makes of the weight as it is, to the bit."""
    rows = x.shape[: x.ndim - num_inputs]

    def kernel(x: Array, panels: Array) -> Array:
        result = jax.ShapeDtypeStruct((len(x), math.prod(outputs)), out_dtype or x.dtype)
        call = native.ffi_call("jaxllm_matmul", result, vmap_method="sequential")
        return call(x, panels, native.num_rows(num_tokens, rows), transposed=False, batch_invariant=batch_invariant)

    def by_xla(x: Array, panels: Array) -> Array:
        return reference.einsum("...a,ab->...b", x, from_panels(panels), out_dtype)

    y = with_gradient_of(by_xla, kernel, num_tokens)(x.reshape(math.prod(rows), -1), panels)
    return y.reshape(*rows, *outputs)


def grouped_panel_product(
    x: Float[Array, "rows ..."],
    panels: Float[Array, "experts panels units ..."],
    offsets: Int[Array, " experts_plus_1"],
    *,
    outputs: tuple[int, ...],
    out_dtype: Any = None,
) -> Float[Array, "rows ..."]:
    """Likewise rows `offsets[e]:offsets[e + 1]` of `x[rows, *inputs]` with the weight of expert e, `[rows, *outputs]`;
    rows of none come out as zeros."""
    result, nothing = jax.ShapeDtypeStruct((len(x), math.prod(outputs)), out_dtype or x.dtype), jnp.zeros(0)
    rows = x.reshape(len(x), math.prod(x.shape[1:]))  # of which there may be none
    call = native.ffi_call("jaxllm_grouped_matmul", result)
    return call(rows, offsets, panels, nothing, nothing, nothing, by_output=False).reshape(len(x), *outputs)
