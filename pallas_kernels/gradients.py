"""Kernels that JAX differentiates as it does the operations that define them."""

from collections.abc import Callable
from typing import Any

import jax


def with_gradient_of(
    reference: Callable[..., Any], kernel: Callable[..., Any], num_tokens: Any = None
) -> Callable[..., Any]:
    """`kernel`, a function of arrays, whose derivatives (in reverse mode) are those of `reference`, which computes the
    same. In an engine's step, which alone knows `num_tokens`, it has none."""
    if num_tokens is not None:
        return kernel

    @jax.custom_vjp
    def op(*args: Any) -> Any:
        return kernel(*args)

    def forward(*args: Any) -> tuple[Any, tuple[Any, ...]]:
        return kernel(*args), args

    def backward(args: tuple[Any, ...], cotangents: Any) -> tuple[Any, ...]:
        return jax.vjp(reference, *args)[1](cotangents)

    op.defvjp(forward, backward)
    return op
