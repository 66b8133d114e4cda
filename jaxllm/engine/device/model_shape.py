"""A model as the executables see it."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from jaxllm.engine.config import EngineConfig
from jaxllm.engine.device.cache_layout import CacheLayout, cache_layout
from jaxllm.engine.model_interface import cache_specs
from jaxllm.engine.pooling import task_of
from jaxllm.models.cache_spec import CacheSpec
from jaxllm.models.context import StepContext
from jaxllm.models.layers import Norm
from jaxllm.models.moe import Experts
from jaxllm.models.transformer import Params
from jaxllm.pallas_kernels.dispatch import Placement
from jaxllm.sharding.expand import padded, repeated
from jaxllm.sharding.rules import sharding

_KV_DTYPES = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn}


@dataclass(frozen=True)
class ModelShape:
    """A model as the executables see it: NNX graph, shapes and shardings of the leaves, what its layers cache."""

    graph: nnx.GraphDef
    treedef: Any  # of the parameters; the executables take flat leaves, which cost no flattening a step
    leaves: Sequence[jax.ShapeDtypeStruct]  # with shardings
    caches: tuple[tuple[CacheSpec, ...], ...]  # of each layer
    vocab: int
    logits_width: int  # of them, and of what pads them on several devices
    token_widths: tuple[int, ...]  # elements of a token: the residual stream, then a layer's intermediate results
    dtype: Any
    routed_width: int = 0  # elements of a token's rows for its experts, which each device has whole
    generates: bool = True  # whether hidden states become logits
    has_head: bool = False  # whether pooled hidden states go through the model's `head`

    def model(self, leaves: Sequence[Any]) -> Any:
        return nnx.merge(self.graph, jax.tree.unflatten(self.treedef, leaves))

    def cache_layout(self, config: EngineConfig, mesh: Mesh) -> CacheLayout:
        """Of an engine of this context length and block size."""
        sizes = {"max_model_len": config.max_model_len, "block_size": config.block_size}
        return cache_layout(self.caches, self.kv_dtype(config), mesh, **sizes)

    def kv_dtype(self, config: EngineConfig) -> Any:
        """Of the keys and values in the pool."""
        return _KV_DTYPES.get(config.kv_cache_dtype, self.dtype)

    @cached_property
    def head_indices(self) -> tuple[int, ...]:
        """Which of the leaves make logits of hidden states: a sampler takes no others."""
        return self._used_by("logits", self.hidden.dtype) if self.generates else ()

    @cached_property
    def pool_indices(self) -> tuple[int, ...]:
        """Likewise, of pooled hidden states whatever the model's `head` makes."""
        return self._used_by("head", jnp.float32) if self.has_head else ()

    def _used_by(self, method: str, dtype: Any) -> tuple[int, ...]:
        def call(leaves: Sequence[Array], hidden: Array) -> Array:
            return getattr(self.model(leaves), method)(hidden, StepContext.of(jnp.zeros(1, jnp.int32)))

        hidden = jax.ShapeDtypeStruct((1, *self.hidden.shape), dtype)
        jaxpr = jax.make_jaxpr(call)(list(self.leaves), hidden).jaxpr
        used = {var for equation in jaxpr.eqns for var in equation.invars if not hasattr(var, "val")}
        return tuple(i for i, var in enumerate(jaxpr.invars[: len(self.leaves)]) if var in used)

    def _with(self, indices: Sequence[int], given: Sequence[Array]) -> Any:
        """The model with the leaves of `indices`; the others stay shapes, which nobody looks at."""
        leaves: list[Any] = list(self.leaves)
        for i, leaf in zip(indices, given, strict=True):
            leaves[i] = leaf
        return self.model(leaves)

    @property
    def head(self) -> list[jax.ShapeDtypeStruct]:
        return [self.leaves[i] for i in self.head_indices]

    @property
    def pool_head(self) -> list[jax.ShapeDtypeStruct]:
        return [self.leaves[i] for i in self.pool_indices]

    def logits(
        self,
        head: Sequence[Array],
        hidden: Float[Array, "max_tokens embed"],
        tokens: Int[Array, " rows"],
        at: Placement,
        num_rows: Int[Array, ""] | None = None,
    ) -> Float[Array, "rows logits_width"]:
        """The model's logits after the `tokens` of a step, counted flat, from the leaves `head_indices`; minus infinity
        where they are no token's. Rows from `num_rows` on, if that is given, are padding, and may be anything."""
        ctx = StepContext.of(tokens, placement=at)  # the head reads neither rows nor positions
        ctx = dataclasses.replace(ctx, num_tokens=num_rows)
        logits = self._with(self.head_indices, head).logits(hidden.at[tokens].get(mode="clip"), ctx)
        if self.logits_width == self.vocab:
            return logits
        logits = jnp.pad(logits, ((0, 0), (0, self.logits_width - logits.shape[1])))  # of a head that is not split
        return jnp.where(jnp.arange(self.logits_width)[None, :] < self.vocab, logits, -jnp.inf)

    def classify(
        self, head: Sequence[Array], pooled: Float[Array, "rows embed"], at: Placement
    ) -> Float[Array, "rows outputs"]:
        """What the model's head makes of pooled hidden states, from the leaves `pool_indices`; they themselves if it
        has none."""
        if not self.has_head:
            return pooled
        ctx = StepContext.of(jnp.zeros(len(pooled), jnp.int32), placement=at)
        return self._with(self.pool_indices, head).head(pooled, ctx)

    @property
    def hidden(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype of one token's hidden state."""
        return jax.ShapeDtypeStruct((self.token_widths[0],), self.dtype)


def model_shape(cfg: Any, graph: nnx.GraphDef, state: Params, mesh: Mesh) -> ModelShape:
    """The shape of a model on `mesh`; `state` holds its parameters, or their shapes."""

    def place(variable: nnx.Variable) -> nnx.Variable:
        value = variable.get_value()
        where = sharding(variable.get_metadata("axes"), mesh)
        placed = jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=where)
        return variable.replace(placed)

    state = jax.tree.map(place, state, is_leaf=lambda x: isinstance(x, nnx.Variable))
    leaves, treedef = jax.tree.flatten(state)
    kv_heads = repeated(cfg.kv_heads, mesh)
    group = -(-cfg.heads // kv_heads)  # query heads of each
    mixtures = [spec for spec in _feed_forwards(cfg) if isinstance(spec, Experts)]
    top_k = max((spec.routing.top_k for spec in mixtures), default=0)
    mlp = max((spec.mlp for spec in mixtures), default=0)
    return ModelShape(
        graph=graph,
        treedef=treedef,
        leaves=tuple(leaves),
        caches=cache_specs(nnx.merge(graph, state), cfg, mesh),
        vocab=cfg.vocab,
        logits_width=padded(cfg.vocab, mesh),
        dtype=cfg.dtype,
        token_widths=(cfg.embed, 2 * cfg.mlp, (group + 2) * kv_heads * cfg.head_dim, 2 * top_k * mlp),
        routed_width=top_k * cfg.embed,
        generates=task_of(cfg) == "generate",
        has_head=task_of(cfg) == "classify",
    )


def _feed_forwards(cfg: Any) -> list[Any]:
    """Of the layers, where a caller's own configuration says them."""
    return [getattr(spec, "feed_forward", None) for spec in getattr(cfg, "layers", ())]


def with_config(shape: ModelShape, model: Any, config: EngineConfig) -> ModelShape:
    """`shape` with the graph of `model` for this context, which some ropes depend on, and order of additions."""
    model.cfg = dataclasses.replace(model.cfg, max_len=config.max_model_len)
    for _, node in nnx.iter_graph(model):
        if isinstance(node, Norm) and config.batch_invariant:
            node.fixed_order = True
    return dataclasses.replace(shape, graph=nnx.graphdef(model))
