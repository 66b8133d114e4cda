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
        """`layer(*arguments)`; what it changes in variables is there for the layers after it. Where an argument is no
        pytree of arrays, as several caches that a layer puts back itself, it is called as it is."""
        if not all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(arguments)):
            return layer(*arguments)
        graph, state = nnx.split(layer)
        leaves, tree = jax.tree.flatten(state)
        shared = next((function for kind, function in self._shared if kind == (graph, tree)), None)
        if shared is None:
            shared = jax.jit(partial(_call, graph, tree))
            self._shared.append(((graph, tree), shared))
        result, changed = shared(leaves, *arguments)
        if changed:
            variables = _variables(layer)
            for i, value in changed.items():
                variables[i].set_value(value)
        return result


def _call(graph: Any, tree: Any, leaves: list[jax.Array], *arguments: Any) -> tuple[Any, dict[int, Any]]:
    """The result, and the values of those variables that the layer has changed, by their places among all."""
    layer = nnx.merge(graph, jax.tree.unflatten(tree, leaves))
    variables = _variables(layer)
    before = [variable.get_value() for variable in variables]
    result = layer(*arguments)
    after = [variable.get_value() for variable in variables]
    return result, {i: new for i, (old, new) in enumerate(zip(before, after, strict=True)) if new is not old}


def _variables(layer: nnx.Module) -> list[nnx.Variable]:
    """In an order that is the same for layers of equal graph definitions."""
    return [node for _, node in nnx.iter_graph(layer) if isinstance(node, nnx.Variable)]


def plain_call(layer: nnx.Module, *arguments: Any) -> Any:
    """`layer(*arguments)`"""
    return layer(*arguments)
