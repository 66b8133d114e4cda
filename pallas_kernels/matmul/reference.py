"""Defines the product with a weight, in jnp. XLA's code for it is best where many rows share the weight."""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float


def einsum(
    equation: str, x: Float[Array, "..."], weight: Float[Array, "..."], out_dtype: Any = None, *, num_tokens: Any = None
) -> Float[Array, "..."]:
    """`jnp.einsum`, of equations "...C,CO->...O" or "...C,OC->...O": C and O stand for some letters each.

    The result is rounded to the dtype of x; with `out_dtype` float32 it is the float32 sums as they are. A weight
    of 16 bits may be multiplied with float32.
    """
    del num_tokens  # XLA multiplies padding, too
    if x.dtype == jnp.float32 and weight.dtype in (jnp.bfloat16, jnp.float16):
        weight = weight.astype(jnp.float32)
    contracted, outputs, transposed = split(equation)
    # One axis to sum over: XLA transposes, for a GPU and at each call, a weight that has several. (The others stay: a
    # mesh may split any of them.)
    x = x.reshape(*x.shape[: x.ndim - len(contracted)], -1)
    if transposed:
        weight = weight.reshape(*weight.shape[: len(outputs)], -1)
        return jnp.einsum(f"...C,{outputs}C->...{outputs}", x, weight, preferred_element_type=out_dtype)
    weight = weight.reshape(-1, *weight.shape[len(contracted) :])
    return jnp.einsum(f"...C,C{outputs}->...{outputs}", x, weight, preferred_element_type=out_dtype)


def split(equation: str) -> tuple[str, str, bool]:
    """The contracted letters, the output letters, and whether the output letters come first in the weight."""
    operands, result = equation.split("->")
    x, weight = operands.split(",")
    contracted, outputs = x.removeprefix("..."), result.removeprefix("...")
    assert weight in (contracted + outputs, outputs + contracted), equation
    return contracted, outputs, weight != contracted + outputs


class Matrices(NamedTuple):
    """A product's operands with one axis of rows, inputs and outputs each; `rows` and `columns` are the result's."""

    x: Array  # [rows, inputs]
    weight: Array  # [inputs, outputs], or transposed
    transposed: bool
    rows: tuple[int, ...]
    columns: tuple[int, ...]


def as_matrices(equation: str, x: Array, weight: Array) -> Matrices:
    contracted, outputs, transposed = split(equation)
    rows, inputs = x.shape[: x.ndim - len(contracted)], math.prod(x.shape[x.ndim - len(contracted) :])
    columns = weight.shape[: len(outputs)] if transposed else weight.shape[len(contracted) :]
    size = math.prod(columns)
    matrix = weight.reshape((size, inputs) if transposed else (inputs, size))
    return Matrices(x.reshape(math.prod(rows), inputs), matrix, transposed, rows, columns)
