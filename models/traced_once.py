"""Layers that are alike, traced and lowered once, so that a model's depth costs no Python time."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from flax import nnx


class TracedOnce:
    """Calls the layers of a step. Those of equal graph definitions share a function inside the step, which the compiler
    puts in the place of each call: what is compiled is the step of layers called one by one."""

    def __init__(self) -> None:
        self._shared: list[tuple[Any, Callable]] = []

    def __call__(self, layer: nnx.Module, *arguments: Any) -> Any:
        """`layer(*arguments)`; what it changes in itself is lost. Where an argument is no pytree of arrays, as several
        caches that a layer puts back itself, it is called as it is."""
        if not all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(arguments)):
            return layer(*arguments)
        graph, state = nnx.split(layer)
        leaves, tree = jax.tree.flatten(state)
        shared = next((function for kind, function in self._shared if kind == (graph, tree)), None)
        if shared is None:
            shared = jax.jit(partial(_call, graph, tree))
            self._shared.append(((graph, tree), shared))
        return shared(leaves, *arguments)


def _call(graph: Any, tree: Any, leaves: list[jax.Array], *arguments: Any) -> Any:
    return nnx.merge(graph, jax.tree.unflatten(tree, leaves))(*arguments)


def plain_call(layer: nnx.Module, *arguments: Any) -> Any:
    """`layer(*arguments)`"""
    return layer(*arguments)
