"""Products of activations with a weight. Callers import from here; only this module chooses by platform."""

from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Float

from jaxllm.pallas_kernels import dispatch
from jaxllm.pallas_kernels.matmul import native, reference

IMPLEMENTATIONS: dict[str, Callable] = {"reference": reference.einsum, "native": native.einsum}


def einsum(
    equation: str,
    x: Float[Array, "..."],
    weight: Float[Array, "..."],
    *,
    out_dtype: Any = None,
    implementation: str = "auto",
    platform: str | None = None,
) -> Float[Array, "..."]:
    """See `reference.einsum`. `platform` is that of the one device that the arrays are on; None: of several, or
    unknown, where XLA divides the work."""
    preferred: dict[str, str] = {}
    if platform == "cpu" and native.supports(equation, x, weight):
        preferred["cpu"] = "native"
    chosen = dispatch.choose(IMPLEMENTATIONS, preferred, implementation, platform or "none")
    return chosen(equation, x, weight, out_dtype)
