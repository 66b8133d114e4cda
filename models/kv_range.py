"""How large a model's keys and values are: what the scales of 8-bit caches are made of."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Shaped

from jaxllm.models.cache import Dense
from jaxllm.models.cache_spec import CacheSpec
from jaxllm.models.state_cache import DenseState, Step


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVRange:
    """Attention within each row of `row_len` tokens, of rows that are given flat, one after the other. Keeps the
    largest absolute key and value of each head."""

    largest: Float32[Array, "2 kv_heads"]
    row_len: int = field(metadata={"static": True})

    def attend(self, q: Array, k: Array, v: Array, **options: Any) -> tuple[Array, "KVRange"]:
        """As `Dense`, of `[rows * row_len, ...]`."""
        wide = [x.astype(jnp.float32) for x in (q, k, v)]
        out, _ = Dense().attend(*(_in_rows(x, self.row_len) for x in wide), **options)
        found = jnp.stack([jnp.max(jnp.abs(x), axis=(0, 2)) for x in wide[1:]])
        return out.reshape(q.shape).astype(q.dtype), replace(self, largest=jnp.maximum(self.largest, found))


@dataclass(frozen=True)
class StateOfRows:
    """A recurrence over such rows, each from its beginning."""

    row_len: int

    def scan(self, step: Step, start: Shaped[Array, "..."], inputs: Any) -> tuple[Any, "StateOfRows"]:
        """As `DenseState`, of `[rows * row_len, ...]`."""
        outputs, _ = DenseState().scan(step, start, jax.tree.map(lambda x: _in_rows(x, self.row_len), inputs))
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), outputs), self


def _in_rows(x: Array, row_len: int) -> Array:
    return x.reshape(-1, row_len, *x.shape[1:])


def range_caches(specs: Sequence[tuple[CacheSpec, ...]], row_len: int) -> list[Any]:
    """The caches of all layers, to be given to a model."""

    def cache(spec: CacheSpec) -> KVRange | StateOfRows:
        return StateOfRows(row_len) if spec.is_state else KVRange(jnp.zeros((2, spec.shape[0])), row_len)

    return [[cache(spec) for spec in layer] if len(layer) > 1 else cache(layer[0]) for layer in specs]


def ranges_of(caches: Sequence[Any]) -> list[Float32[Array, "2 kv_heads"]]:
    """What the caches of keys and values have kept, in the order of the layers and of each layer's caches."""
    flat = [cache for layer in caches for cache in (layer if isinstance(layer, list) else [layer])]
    return [cache.largest for cache in flat if isinstance(cache, KVRange)]
