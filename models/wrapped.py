"""What the engine serves where a model is no module of its interface: a function of a pytree, a module with arrays that
are no variables, or one without a configuration."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array

from jaxllm.models.cache_spec import CacheSpec
from jaxllm.models.context import StepContext
from jaxllm.models.definition import Definition


class Constant(nnx.Variable):
    """An array that a module has as it is."""


class Wrapped(nnx.Module):
    """A model of a pytree: each array is a variable of this module, by its dotted name in the pytree.

    `make(tree, cfg)` gives an object with `__call__(tokens, ctx, caches)` and `logits(hidden, ctx)`, and perhaps
    `cache_specs()`. Arrays that lie in the pytree as they are become variables of `kind`.
    """

    def __init__(
        self, name: str, cfg: Any, make: Callable[[Any, Any], Any], tree: Any, kind: type[nnx.Variable] = nnx.Param
    ):
        self.wrapped_name, self.cfg = name, cfg
        leaves, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_variable)
        names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves]
        if clash := sorted({name for name in names if not name or name == "cfg" or name.startswith("wrapped_")}):
            raise ValueError(f"the parameters need other names than {clash}; put them in a dict")
        self.wrapped_make, self.wrapped_treedef = make, treedef
        self.wrapped_leaves = tuple((name, _is_variable(leaf)) for name, (_, leaf) in zip(names, leaves, strict=True))
        for name, (_, leaf) in zip(names, leaves, strict=True):
            setattr(self, name, leaf if _is_variable(leaf) else kind(leaf))

    @classmethod
    def of_module(cls, module: nnx.Module, cfg: Any) -> "Wrapped":
        """`module` with `cfg` as its configuration; its arrays have the names that they have there. The keys of its
        random numbers stay those that they are: no two steps draw others."""
        graph, keys, state = nnx.split(module, nnx.RngState, ...)
        return cls(type(module).__qualname__, cfg, _Merge(graph, keys, definition_of(module)), state, Constant)

    @property
    def model(self) -> Any:
        leaves = [getattr(self, name) for name, _ in self.wrapped_leaves]
        values = [
            leaf if is_variable else leaf.get_value()
            for leaf, (_, is_variable) in zip(leaves, self.wrapped_leaves, strict=True)
        ]
        return self.wrapped_make(jax.tree.unflatten(self.wrapped_treedef, values), self.cfg)

    def __call__(self, tokens: Array, ctx: StepContext, caches: Any) -> tuple[Array, Any]:
        return self.model(tokens, ctx, caches)

    def logits(self, hidden: Array, ctx: StepContext) -> Array:
        return self.model.logits(hidden, ctx)

    def head(self, pooled: Array, ctx: StepContext) -> Array:
        return self.model.head(pooled, ctx)

    def cache_specs(self) -> Any:
        model = self.model
        if hasattr(model, "cache_specs"):
            return model.cache_specs()
        return [(CacheSpec.keys_and_values(self.cfg.kv_heads, self.cfg.head_dim),)] * self.cfg.num_layers


class _Merge:
    """Makes a module of its state again; equal ones are of equal graphs, and the same keys."""

    def __init__(self, graph: nnx.GraphDef, keys: Any, definition: Definition | None):
        self.graph, self.keys, self.definition = graph, keys, definition

    def __call__(self, state: Any, cfg: Any) -> nnx.Module:
        keys = jax.tree.map(lambda key: key, self.keys)  # variables of this trace, which may count up
        module = nnx.merge(self.graph, keys, state)
        if hasattr(module, "cfg"):
            module.cfg = cfg
        return module

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Merge) and self.graph == other.graph and self.keys is other.keys

    def __hash__(self) -> int:
        return hash(self.graph)


def definition_of(model: nnx.Module) -> Definition | None:
    """Of a module, which may be wrapped; None for functions that are."""
    return getattr(model.wrapped_make, "definition", None) if isinstance(model, Wrapped) else Definition.of(model)


def name_of(model: Any) -> str:
    """Of the class of a model, which may be wrapped."""
    return model.wrapped_name if isinstance(model, Wrapped) else type(model).__qualname__


def _is_variable(leaf: Any) -> bool:
    return isinstance(leaf, nnx.Variable)
