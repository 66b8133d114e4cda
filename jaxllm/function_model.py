"""Models that are no modules of our interface: functions of a pytree, Linen modules, other NNX modules."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import jax.numpy as jnp
from flax import linen, nnx
from jaxtyping import Array

from jaxllm.argument_checks import a_type, check_int
from jaxllm.models.context import StepContext
from jaxllm.models.wrapped import Wrapped

_MOST = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class FunctionShape:
    """What the engine must know of a model that is a function: sizes in elements, `max_len` in tokens.

    `kv_heads` and `head_dim` are those of the keys and values that each layer caches; `mlp` is the largest width
    between two products, of which memory is planned. `dtype` is found out: that of the keys. Raises `ValueError`.
    """

    vocab: int
    embed: int
    num_layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    max_len: int
    dtype: Any = jnp.float32

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name != "dtype":
                check_int(field.name, getattr(self, field.name), 1, _MOST)
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}")


@dataclass(frozen=True)
class _Functions:
    """Two functions as the object that `Wrapped` makes of a pytree."""

    call: Callable[..., Any]
    head: Callable[..., Any]

    def __call__(self, params: Any, cfg: Any) -> "_Bound":
        return _Bound(self, params)


@dataclass(frozen=True)
class _Bound:
    functions: _Functions
    params: Any

    def __call__(self, tokens: Array, ctx: StepContext, caches: Any) -> tuple[Array, Any]:
        return self.functions.call(self.params, tokens, ctx, caches)

    def logits(self, hidden: Array, ctx: StepContext) -> Array:
        return self.functions.head(self.params, hidden)


@dataclass(frozen=True)
class _Method:
    """A method of a Linen module as a function of its variables."""

    module: linen.Module
    name: str

    def __call__(self, variables: Any, *arguments: Any) -> Any:
        return self.module.apply(variables, *arguments, method=self.name)


def as_model(model: Any, params: Any, shape: Any, head: Any) -> Any:
    """The module that `LLM(model, params, shape=shape, head=head)` serves; `model` itself where it is all there is.
    Raises `TypeError`."""
    if params is None and shape is None and head is None:
        return model
    if not isinstance(shape, FunctionShape):
        raise TypeError(
            f"shape is {a_type(shape)}; a function, or a module without the interface of jaxllm.models, needs "
            "shape=jaxllm.FunctionShape(vocab=..., embed=..., ...)"
        )
    if isinstance(model, nnx.Module):
        if params is not None or head is not None:
            raise TypeError(
                f"{type(model).__qualname__} has its parameters and its method logits(hidden, ctx); leave params and "
                "head out"
            )
        return Wrapped.of_module(model, shape)
    if not callable(model) or params is None:
        raise TypeError(
            f"model is {a_type(model)} and params {a_type(params)}; give LLM(fn, params, shape=..., head=...) with "
            "fn(params, tokens, ctx, caches) -> (hidden, caches) and head(params, hidden) -> logits"
        )
    if isinstance(model, linen.Module):
        head = "logits" if head is None else head
        functions = _Functions(_Method(model, "__call__"), _Method(model, head) if isinstance(head, str) else head)
        return Wrapped(type(model).__qualname__, shape, functions, params)
    if not callable(head):
        raise TypeError(f"head is {a_type(head)}; give head(params, hidden) -> float32 logits [tokens, vocab]")
    return Wrapped(getattr(model, "__qualname__", type(model).__qualname__), shape, _Functions(model, head), params)
