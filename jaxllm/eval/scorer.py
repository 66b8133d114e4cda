"""A model's log-probabilities, computed where its parameters lie: only a few numbers a token leave the device."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Float32, Int32, Shaped

from jaxllm.engine.config import BLOCK_SIZE, MOST_BLOCKS, EngineConfig
from jaxllm.engine.device.kv_scales import measure, place_scales, scale_shapes
from jaxllm.engine.device.model_shape import ModelShape, model_shape
from jaxllm.engine.kv_cache import check_kv_dtype, fixed_scales, scale_command, with_scales
from jaxllm.engine.model_source import ModelSource
from jaxllm.engine.pooling import task_of
from jaxllm.engine.sizing import CPU_SIZES
from jaxllm.models.cache import Dense
from jaxllm.models.cache_spec import CacheSpec
from jaxllm.models.context import StepContext
from jaxllm.models.state_cache import DenseState
from jaxllm.pallas_kernels.dispatch import Placement

_BLOCK = 128  # tokens whose logits are on the device at once


class Head(NamedTuple):
    """What makes logits of hidden states: all that is needed of a reference once it has read the texts."""

    shape: ModelShape
    leaves: tuple[Array, ...]


class Comparison(NamedTuple):
    """Of each token that is scored."""

    logprobs: Float32[Array, " tokens"]  # the model's, of the token
    reference: Float32[Array, " tokens"]  # the reference's
    kld: Float32[Array, " tokens"]  # the model's divergence from the reference
    same_top: Bool[Array, " tokens"]


class Scorer:
    """A model with its parameters on a mesh, which reads rows of tokens without a cache. Of each shape of rows one
    executable is compiled. With a `kv_cache_dtype` of 8 bits, keys and values are what an engine's pool would hold."""

    def __init__(
        self, source: ModelSource, mesh: Mesh, *, kv_cache_dtype: str = "auto", calculate_kv_scales: bool = False
    ):
        if task_of(source.cfg) != "generate":
            raise ValueError(f"{source.name or 'the model'} predicts no tokens, so that there is nothing to evaluate")
        source.expand(mesh)
        graph, state = nnx.split(source.model)
        self.shape = model_shape(source.cfg, graph, state, mesh)
        self._at = Placement(mesh)
        self._leaves = tuple(jax.tree.leaves(source.place(state, mesh)))
        self._scale_shapes = scale_shapes(self.shape, mesh)
        kind = check_kv_dtype(kv_cache_dtype, self.shape.dtype)
        config = _engine_config(source, kv_cache_dtype=kind, measures_kv_scales=calculate_kv_scales)
        self._kv_dtype = self.shape.kv_dtype(config)
        self._kv_scales = self._make_scales(source, config)

    def _make_scales(self, source: ModelSource, config: EngineConfig) -> list[Array]:
        """As an engine's; none for keys and values of the model's dtype."""
        fixed = fixed_scales(source, self.shape, config)
        command = scale_command(source, with_scales(config, fixed), fixed)
        if command is None:
            return []
        (array,) = command.arrays
        if command.kind == "kv_scales":
            return place_scales(array, self._scale_shapes)
        run = partial(measure, model_shape=self.shape, dtype=self._kv_dtype, placement=self._at)
        return jax.jit(run)(self._leaves, array)

    @property
    def head(self) -> Head:
        return Head(self.shape, tuple(self._leaves[i] for i in self.shape.head_indices))

    def hidden(self, tokens: Int32[np.ndarray, "rows len"], first: int) -> Float[Array, "rows scored embed"]:
        """The hidden states that predict the tokens from `first` on of each row."""
        options = {"shape": self.shape, "first": first, "at": self._at, "kv_dtype": self._kv_dtype}
        found = _hidden(self._leaves, tokens, self._kv_scales, **options)
        return jax.block_until_ready(found)  # simulated devices may not get through two steps' collectives at once

    def logprobs(self, tokens: Int32[np.ndarray, "rows len"], first: int) -> Float32[np.ndarray, "rows scored"]:
        """The logarithm of the probability of each row's tokens from `first` on."""
        targets = tokens[:, first:]
        found = _logprobs(self.head.leaves, self.hidden(tokens, first), targets, shape=self.shape, at=self._at)
        return np.asarray(found).reshape(targets.shape)

    def compare(
        self,
        tokens: Int32[np.ndarray, "rows len"],
        first: int,
        head: Head,
        hidden: Float[np.ndarray, "rows scored embed"],
    ) -> Comparison:
        """Likewise, and what a reference makes of the same tokens, of its head and its hidden states."""
        ours = self.hidden(tokens, first)
        heads, shapes = (self.head.leaves, head.leaves), (self.shape, head.shape)
        return Comparison(
            *jax.device_get(_compare(heads, (ours, hidden), tokens[:, first:], shapes=shapes, at=self._at))
        )


def _engine_config(source: ModelSource, **options: Any) -> EngineConfig:
    """Of an engine whose scales are to be had."""
    tokens = CPU_SIZES["max_num_batched_tokens"]
    sizes = {"max_model_len": source.cfg.max_len, "max_num_seqs": 1, "max_num_batched_tokens": tokens}
    return EngineConfig(**sizes, block_size=BLOCK_SIZE, num_blocks=MOST_BLOCKS, **options)


@partial(jax.jit, static_argnames=("shape", "first", "at", "kv_dtype"))
def _hidden(
    leaves: Sequence[Array],
    tokens: Int32[Array, "rows len"],
    kv_scales: Sequence[Array],
    *,
    shape: ModelShape,
    first: int,
    at: Placement,
    kv_dtype: Any,
) -> Float[Array, "rows scored embed"]:
    left = iter(kv_scales)

    def cache(spec: CacheSpec) -> Any:
        return DenseState() if spec.is_state else Dense(next(left), kv_dtype) if kv_scales else Dense()

    caches: list[Any] = [[cache(spec) for spec in layer] for layer in shape.caches]
    caches = [layer[0] if len(layer) == 1 else layer for layer in caches]
    hidden, _ = shape.model(leaves)(tokens, StepContext.of(tokens, placement=at), caches)
    return hidden[:, first - 1 : -1]


@partial(jax.jit, static_argnames=("shape", "at"))
def _logprobs(
    head: Sequence[Array],
    hidden: Float[Array, "rows scored embed"],
    targets: Int32[Array, "rows scored"],
    *,
    shape: ModelShape,
    at: Placement,
) -> Float32[Array, " tokens"]:
    def of_block(block: tuple[Array, Array]) -> Array:
        return _of_targets(_log_softmax(shape, head, block[0], at), block[1])

    return _in_blocks(of_block, hidden, targets)


@partial(jax.jit, static_argnames=("shapes", "at"))
def _compare(
    heads: tuple[Sequence[Array], Sequence[Array]],
    hidden: tuple[Float[Array, "rows scored embed"], Float[Array, "rows scored embed_of_reference"]],
    targets: Int32[Array, "rows scored"],
    *,
    shapes: tuple[ModelShape, ModelShape],
    at: Placement,
) -> Comparison:
    def of_block(block: tuple[Array, Array, Array]) -> Comparison:
        *states, ids = block
        q, p = (_log_softmax(*each, at) for each in zip(shapes, heads, states, strict=True))
        kld = jnp.sum(jnp.where(p > -jnp.inf, jnp.exp(p) * (p - q), 0.0), axis=-1)  # models may forbid tokens
        same_top = jnp.argmax(p, axis=-1) == jnp.argmax(q, axis=-1)
        return Comparison(_of_targets(q, ids), _of_targets(p, ids), kld, same_top)

    return _in_blocks(of_block, *hidden, targets)


def _log_softmax(
    shape: ModelShape, head: Sequence[Array], hidden: Float[Array, "tokens embed"], at: Placement
) -> Float32[Array, "tokens vocab"]:
    logits = shape.logits(head, hidden, jnp.arange(len(hidden), dtype=jnp.int32), at)
    return jax.nn.log_softmax(logits[:, : shape.vocab].astype(jnp.float32), axis=-1)


def _of_targets(logprobs: Float32[Array, "tokens vocab"], ids: Int32[Array, " tokens"]) -> Float32[Array, " tokens"]:
    return jnp.take_along_axis(logprobs, ids[:, None], axis=1)[:, 0]


def _in_blocks(of_block: Callable[[Any], Any], *arrays: Shaped[Array, "rows scored ..."]) -> Any:
    """What `of_block` makes of the tokens of `arrays`, some at a time: `[rows * scored]`."""
    num_tokens = arrays[0].shape[0] * arrays[0].shape[1]
    size = min(_BLOCK, num_tokens)
    padding = -num_tokens % size

    def blocks(array: Array) -> Array:
        flat = array.reshape(num_tokens, *array.shape[2:])
        return jnp.pad(flat, [(0, padding)] + [(0, 0)] * (flat.ndim - 1)).reshape(-1, size, *flat.shape[1:])

    found = jax.lax.map(of_block, tuple(map(blocks, arrays)))
    return jax.tree.map(lambda array: array.reshape(-1)[:num_tokens], found)
