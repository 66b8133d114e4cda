"""Gated activations for CPUs in C++: in float32, rounded once."""

from functools import partial

import jax
from jaxtyping import Array, Float, Int

from jaxllm.pallas_kernels import native
from jaxllm.pallas_kernels.gated import reference
from jaxllm.pallas_kernels.gradients import with_gradient_of
from jaxllm.pallas_kernels.matmul.native import DTYPES as OF_PRODUCTS
from jaxllm.pallas_kernels.matmul.panels import from_panels

DTYPES = ("float32", "bfloat16")
KINDS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}


def supports(x: Array, activation: str, weight: Array | None = None) -> bool:
    """Whether the kernels are built and have this activation and these dtypes."""
    has_dtypes = x.dtype.name in DTYPES if weight is None else (x.dtype.name, weight.dtype.name) in OF_PRODUCTS
    return has_dtypes and activation in KINDS and native.is_built()


def gated(
    both: Float[Array, "*t 2 width"],
    activation: str,
    *,
    rounds_once: bool = True,
    num_tokens: Int[Array, ""] | None = None,
) -> Float[Array, "*t width"]:
    """See `reference.gated`."""
    del rounds_once  # it always does
    kernel = partial(_gated, is_gelu=KINDS[activation] == "gelu_tanh", num_tokens=num_tokens)
    return with_gradient_of(partial(reference.gated, activation=activation), kernel, num_tokens)(both)


def _gated(both: Array, *, is_gelu: bool, num_tokens: Array | None) -> Array:
    flat = both.reshape(-1, *both.shape[-2:])
    result = jax.ShapeDtypeStruct((flat.shape[0], flat.shape[2]), both.dtype)
    made = native.ffi_call("jaxllm_gated", result)(flat, native.num_rows(num_tokens, both.shape[:-2]), is_gelu=is_gelu)
    return made.reshape(*both.shape[:-2], both.shape[-1])


def gated_product(
    x: Float[Array, "*t d"],
    weight: Float[Array, "d 2 width"],
    activation: str,
    *,
    num_tokens: Int[Array, ""] | None = None,
    batch_invariant: bool = False,
) -> Float[Array, "*t width"]:
    """See `api.gated_product`. Accumulates in float32, as `matmul.native` does."""
    kernel = partial(
        _gated_product, is_gelu=KINDS[activation] == "gelu_tanh", num_tokens=num_tokens, batch_invariant=batch_invariant
    )
    by_xla = partial(reference.gated_product, activation=activation)
    return with_gradient_of(by_xla, lambda x, weight: kernel(x, weight.reshape(len(weight), -1)), num_tokens)(x, weight)


def gated_panel_product(
    x: Float[Array, "*t d"],
    panels: Float[Array, "panels units ..."],
    activation: str,
    *,
    num_tokens: Int[Array, ""] | None = None,
    batch_invariant: bool = False,
) -> Float[Array, "*t width"]:
    """Likewise, of a weight in panels, see `matmul.panels`: the gate's before the others."""
    is_gelu = KINDS[activation] == "gelu_tanh"
    kernel = partial(_gated_product, is_gelu=is_gelu, num_tokens=num_tokens, batch_invariant=batch_invariant)

    def by_xla(x: Array, panels: Array) -> Array:
        weight = from_panels(panels)
        return reference.gated_product(x, weight.reshape(len(weight), 2, -1), activation)

    return with_gradient_of(by_xla, kernel, num_tokens)(x, panels)


def _gated_product(x: Array, weight: Array, *, num_tokens: Array | None, **options: bool) -> Array:
    """Of a matrix [d, 2 * width], or one in panels."""
    *tokens, depth = x.shape
    flat, width = x.reshape(-1, depth), weight.size // depth // 2
    call = native.ffi_call("jaxllm_gated_matmul", jax.ShapeDtypeStruct((flat.shape[0], width), x.dtype))
    used = native.num_rows(num_tokens, tuple(tokens))
    return call(flat, weight, used, **options).reshape(*tokens, width)
