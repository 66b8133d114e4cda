"""What the engine asks of a model: attributes and methods, what its layers cache, and what comes out of it."""

import dataclasses
import inspect
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array

from jaxllm.engine.pooling import task_of
from jaxllm.models.cache_spec import CacheSpec
from jaxllm.models.context import StepContext
from jaxllm.models.transformer import Params
from jaxllm.sharding.expand import padded, repeated

_SIZES = ("vocab", "embed", "num_layers", "heads", "kv_heads", "head_dim", "mlp", "max_len")  # read by the engine


def check_interface(model: nnx.Module, name: str) -> None:
    """TypeError for a module that lacks what the engine reads or calls."""
    cfg = getattr(model, "cfg", None)
    missing = [name for name in (*_SIZES, "dtype") if not (dataclasses.is_dataclass(cfg) and hasattr(cfg, name))]
    if missing:
        raise TypeError(
            f"{name}.cfg must be a dataclass with {', '.join(missing)}, as jaxllm.models.transformer.Config is; or "
            "give LLM(module, shape=jaxllm.FunctionShape(...))"
        )
    methods: dict[str, tuple[str, ...]] = {"__call__": ("tokens", "ctx", "caches")}
    if task_of(cfg) != "embed":
        methods["logits" if task_of(cfg) == "generate" else "head"] = ("hidden", "ctx")
    for method, arguments in methods.items():
        function = getattr(model, method, None)
        if not callable(function):
            raise TypeError(f"{name} has no {method}({', '.join(arguments)}); see jaxllm.models.transformer.Decoder")
        try:
            inspect.signature(function).bind(*arguments)
        except TypeError as error:
            raise TypeError(f"{name}.{method} can't be called as {method}({', '.join(arguments)}): {error}") from error


def cache_specs(model: Any, cfg: Any, mesh: Mesh | None) -> tuple[tuple[CacheSpec, ...], ...]:
    """What each layer of a model caches on a mesh: keys and values of all tokens, if the model does not say."""
    specs = [(CacheSpec.keys_and_values(cfg.kv_heads, cfg.head_dim),)] * cfg.num_layers
    if hasattr(model, "cache_specs"):
        specs = model.cache_specs()
    return tuple(tuple(_expanded(spec, mesh) for spec in of_layer) for of_layer in specs)


def _expanded(spec: CacheSpec, mesh: Mesh | None) -> CacheSpec:
    if spec.is_state or mesh is None:
        return spec
    kv_heads, head_dim = spec.shape
    return dataclasses.replace(spec, shape=(repeated(kv_heads, mesh), head_dim))


class _Watcher:
    """A cache of one layer that notes the keys it is given, and gives the queries back; or runs a recurrence. A pytree
    without leaves, as transformations of a layer take no other arguments."""

    def __init__(self, keys: list[jax.ShapeDtypeStruct], spec: CacheSpec):
        self.keys, self.spec = keys, spec

    def attend(
        self, q: Array, k: Array, v: Array, *, sliding_window: int | None = None, **options: Any
    ) -> tuple[Array, "_Watcher"]:
        kept = None if self.spec.is_state else self.spec.window
        if kept is not None and (sliding_window is None or sliding_window > kept):
            raise ValueError(
                f"a layer attends to {sliding_window or 'all'} tokens, and its cache keeps {kept}, as its cache_specs "
                "say: make the two agree"
            )
        self.keys.append(jax.ShapeDtypeStruct(k.shape, k.dtype))
        return q, self

    def scan(self, step: Any, start: Array, inputs: Any) -> tuple[Any, "_Watcher"]:
        return jax.lax.scan(step, start, inputs)[1], self


jax.tree_util.register_pytree_node(_Watcher, lambda watcher: ((), watcher), lambda watcher, _: watcher)


def kv_dtype(graph: nnx.GraphDef, params: Params, cfg: Any, name: str, mesh: Mesh | None = None) -> Any:
    """Traces the module for a token as the engine will, checks what comes out, and returns the dtype of its keys.
    `mesh` is that for which the model was expanded, if it was."""
    has_logits = task_of(cfg) == "generate"
    keys: list[jax.ShapeDtypeStruct] = []
    wanted: list[tuple[int, ...]] = []  # shapes of the keys, of one token each
    widths = {cfg.vocab} if mesh is None else {cfg.vocab, padded(cfg.vocab, mesh)}  # of the logits

    def forward(params: Params, token: Array) -> tuple[Array, Array]:
        module = nnx.merge(graph, params)
        ctx = StepContext.of(token)
        specs = cache_specs(module, cfg, mesh)
        watchers = [[_Watcher(keys, spec) for spec in of_layer] for of_layer in specs]
        hidden, caches = module(token, ctx, [each[0] if len(each) == 1 else each for each in watchers])
        if len(caches) != len(watchers):
            raise ValueError(f"it returned {len(caches)} caches for {len(watchers)} layers")
        wanted.extend(spec.shape for of_layer in specs for spec in of_layer if not spec.is_state)
        logits = module.logits(hidden, ctx) if has_logits else jnp.zeros((1, cfg.vocab), jnp.float32)
        return hidden, logits

    try:
        hidden, logits = jax.eval_shape(forward, params, jax.ShapeDtypeStruct((1,), jnp.int32))
    except Exception as error:
        raise ValueError(
            f"{name} can't be served: called with tokens [tokens], a StepContext and a list of caches it raises "
            f"{type(error).__name__}: {error}"
        ) from error
    found = [key.shape for key in keys]
    if sorted(found) != sorted((1, *shape) for shape in wanted):
        raise ValueError(
            f"{name} gave its {cfg.num_layers} caches {len(keys)} times keys of shapes {sorted(set(found))} for one "
            "token; each cache of keys and values attends once, with keys [tokens, kv_heads, head_dim] of "
            f"{sorted({(1, *shape) for shape in wanted})}"
        )
    dtype = keys[0].dtype if keys else hidden.dtype
    if (hidden.shape, hidden.dtype) != ((1, cfg.embed), dtype) or logits.shape not in {(1, width) for width in widths}:
        raise ValueError(
            f"{name} makes of one token hidden states {hidden.shape} {hidden.dtype} and logits {logits.shape}; "
            f"expected [1, {cfg.embed}] {dtype}, the dtype of its keys, and [1, {cfg.vocab}]"
        )
    if logits.dtype != jnp.float32:
        raise ValueError(f"{name} makes logits of {logits.dtype}; expected float32, not rounded from the head's sums")
    return dtype
