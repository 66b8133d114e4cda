"""The caches that attention runs over: `Paged` keys and values (engine) or `Dense` ones (training, evaluation).

Both have `attend(q, k, v, *, scale, causal, sliding_window, soft_cap, sinks) -> (out, cache)`, so that one model class
does both. What these mean is what `pallas_kernels.paged_attention.reference` says.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int, Num

from jaxllm.pallas_kernels.dispatch import UNPLACED, Placement
from jaxllm.pallas_kernels.gradients import with_gradient_of
from jaxllm.pallas_kernels.paged_attention import (
    KV_AXES,
    PagedBatch,
    cap,
    kv_shape,
    ragged_paged_attention,
    rounded,
    write_blocks,
)
from jaxllm.sharding.rules import gathered, shard_map


class SharedTokens(NamedTuple):
    """Tokens of a sequence that all shards compute, by whole blocks, and where this shard keeps their keys and values.
    Blocks that there are not lie past the pool."""

    blocks: Int[Array, " n"]
    tokens: Int[Array, "n block_size"]  # of each, among all shards' tokens of the step, one shard's after the other


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Paged:
    """One layer's pool of KV blocks, and the step's batch."""

    kv_pool: Num[Array, "blocks 2 kv_heads block_size head_dim"]
    batch: PagedBatch
    placement: Placement = field(default=UNPLACED, metadata={"static": True})
    kv_scales: Float32[Array, "2 kv_heads"] | None = None  # of a pool of 8-bit numbers: those of keys, and of values
    shared: SharedTokens | None = None

    def attend(
        self,
        q,
        k,
        v,
        *,
        scale: float,
        causal: bool = True,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        sinks: Float[Array, " heads"] | None = None,
    ):
        """Writes `k`, `v` `[tokens, kv_heads, head_dim]`, attends `q` `[tokens, heads, head_dim]`."""
        heads, kv = (None, "heads", None), (None, "kv_heads", None)
        known = {"sinks": (sinks, ("heads",)), "kv_scales": (self.kv_scales, (None, "kv_heads"))}
        more = {name: each for name, each in known.items() if each[0] is not None}  # arrays and their axes
        options = {"scale": scale, "causal": causal, "sliding_window": sliding_window, "soft_cap": soft_cap}

        def attend(q: Array, k: Array, v: Array, pool: Array, batch: PagedBatch, *given: Array) -> tuple[Array, Array]:
            arrays = dict(zip(more, given, strict=True))
            return ragged_paged_attention(q, k, v, pool, batch, placement=self.placement, **options, **arrays)

        in_axes = (heads, kv, kv, KV_AXES, (), *(axes for _, axes in more.values()))
        op = shard_map(attend, self.placement.mesh, in_axes=in_axes, out_axes=(heads, KV_AXES))
        pool = self.kv_pool if self.shared is None else self._with_shared(k, v, self.shared)
        out, pool = op(q, k, v, pool, self.batch, *(array for array, _ in more.values()))
        return out, replace(self, kv_pool=pool)

    def _with_shared(self, k: Array, v: Array, shared: SharedTokens) -> Array:
        """The pool with keys and values of the tokens that other shards have of a sequence of this one, too."""

        def write(k: Array, v: Array, pool: Array, shared: SharedTokens, *kv_scales: Array) -> tuple[Array]:
            # Gathered here, where a device has its own heads alone: outside, it would get all heads of all shards.
            return (write_blocks(gathered(k), gathered(v), pool, *shared, *kv_scales),)

        kv, scales = (None, "kv_heads", None), [] if self.kv_scales is None else [self.kv_scales]
        in_axes = (kv, kv, KV_AXES, (), *((None, "kv_heads") for _ in scales))
        op = shard_map(write, self.placement.mesh, in_axes=in_axes, out_axes=(KV_AXES,))
        (pool,) = op(k, v, self.kv_pool, shared, *scales)
        return pool


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Dense:
    """Attention within each row of a batch `[batch, len]`; keeps nothing and is differentiable.

    Rows that are packed with several texts have `segment_ids`, as `StepContext.of` takes them: a token sees those of
    its own segment alone. `mask` says which keys a query may see, of those that it would see without. `kv_scales` are
    those of a pool of `kv_dtype`: keys and values are what such a pool would hold of them.

    With `block_size` the kernel of `placement` attends, as an engine's over blocks of so many tokens, and XLA computes
    the gradient: rows are then whole texts, without `segment_ids`, `mask` and `kv_scales`."""

    kv_scales: Float32[Array, "2 kv_heads"] | None = None
    kv_dtype: Any = field(default=None, metadata={"static": True})
    segment_ids: Int[Array, "batch len"] | None = None
    mask: Bool[Array, "batch queries keys"] | None = None
    block_size: int | None = field(default=None, metadata={"static": True})
    placement: Placement = field(default=UNPLACED, metadata={"static": True})

    def attend(
        self,
        q,
        k,
        v,
        *,
        scale: float,
        causal: bool = True,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        sinks: Float[Array, " heads"] | None = None,
    ):
        """Attends `q` `[batch, len, heads, head_dim]` to `k`, `v` `[batch, len, kv_heads, head_dim]`."""
        if self.block_size is not None:
            options = {"scale": scale, "causal": causal, "sliding_window": sliding_window, "soft_cap": soft_cap}
            return self._attend_in_blocks(q, k, v, sinks, options), self
        if self.kv_scales is not None:
            k, v = (
                rounded(x, scales[:, None], self.kv_dtype) for x, scales in zip((k, v), self.kv_scales, strict=True)
            )
        mask = self._visible(*q.shape[:2])
        if soft_cap is not None or sinks is not None:
            return _plain_attention(q, k, v, scale, causal, sliding_window, soft_cap, sinks, mask), self
        window = None if sliding_window is None else (sliding_window - 1, 0 if causal else sliding_window - 1)
        mask = None if mask is None else mask[:, None]
        out = jax.nn.dot_product_attention(q, k, v, mask=mask, scale=scale, is_causal=causal, local_window_size=window)
        return out, self

    def _attend_in_blocks(self, q: Array, k: Array, v: Array, sinks: Array | None, options: dict[str, Any]) -> Array:
        given = {"segment_ids": self.segment_ids, "mask": self.mask, "kv_scales": self.kv_scales}
        if unused := [name for name, value in given.items() if value is not None]:
            raise ValueError(
                f"Dense(block_size={self.block_size}) has {unused}: with a block_size rows are whole texts, as the "
                "engine's kernel takes them; leave one or the other out"
            )

        def by_xla(q: Array, k: Array, v: Array, *sinks: Array) -> Array:
            return Dense().attend(q, k, v, sinks=sinks[0] if sinks else None, **options)[0]

        kernel = partial(_block_attention, block_size=self.block_size, placement=self.placement, options=options)
        return with_gradient_of(by_xla, kernel)(q, k, v, *([] if sinks is None else [sinks]))

    def _visible(self, batch: int, length: int) -> Bool[Array, "batch queries keys"] | None:
        """What a query may see of keys, beside what `causal` and windows say; None: all. Raises `ValueError`."""
        mask, ids = self.mask, self.segment_ids
        if mask is not None and (mask.shape[1:] != (length, length) or mask.ndim != 3 or len(mask) not in (1, batch)):
            raise ValueError(
                f"mask has the shape {mask.shape}; it is [batch, queries, keys], here {(batch, length, length)}"
            )
        if mask is not None and mask.dtype != bool:
            raise ValueError(f"mask has the dtype {mask.dtype}; it is bool, True where a query may see a key")
        if ids is not None and ids.shape != (batch, length):
            raise ValueError(f"segment_ids have the shape {ids.shape}; they are [batch, len], here {(batch, length)}")
        if self.segment_ids is None:
            return self.mask
        same = self.segment_ids[:, :, None] == self.segment_ids[:, None, :]
        return same if self.mask is None else same & self.mask


def check_segments(caches: Iterable[Any]) -> None:
    """Raises `ValueError` for `Dense` ones that would let texts which are packed into a row see each other."""
    if any(isinstance(each, Dense) and each.segment_ids is None and each.mask is None for each in caches):
        raise ValueError(
            "StepContext.of was given segment_ids and Dense was not, so that the texts of a row would see each other; "
            "take Dense(segment_ids=segment_ids), too, or a mask that says what they see"
        )


def _block_attention(
    q: Array, k: Array, v: Array, *sinks: Array, block_size: int, placement: Placement, options: dict[str, Any]
) -> Array:
    """By the kernel of `placement`, over a pool that has blocks for these rows and is gone afterwards."""
    (batch, length), (kv_heads, head_dim) = q.shape[:2], k.shape[2:]
    blocks = jnp.arange(batch * -(-length // block_size), dtype=jnp.int32)
    shape = kv_shape(len(blocks), block_size, kv_heads, head_dim, platform=placement.platform or "")
    rows = PagedBatch(
        block_tables=blocks.reshape(batch, -1),
        cu_q_lens=length * jnp.arange(batch + 1, dtype=jnp.int32),
        kv_lens=jnp.full(batch, length, jnp.int32),
        distribution=jnp.array([0, batch], jnp.int32),
    )
    flat = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
    more = {"sinks": sinks[0]} if sinks else {}
    out, _ = ragged_paged_attention(*flat, jnp.zeros(shape, k.dtype), rows, placement=placement, **options, **more)
    return out.reshape(q.shape)


def _plain_attention(
    q: Array,
    k: Array,
    v: Array,
    scale: float,
    causal: bool,
    window: int | None,
    soft_cap: float | None,
    sinks: Array | None,
    mask: Array | None,
) -> Array:
    """`jax.nn.dot_product_attention` with soft-capped scores and sinks, which it does not support."""
    batch, length, heads, head_dim = q.shape
    grouped = q.reshape(batch, length, k.shape[2], -1, head_dim)
    scores = jnp.einsum("bqkgh,bskh->bkgqs", grouped, k, preferred_element_type=jnp.float32)
    index = jnp.arange(length)
    age = index[:, None] - index[None]
    visible = age >= 0 if causal else jnp.ones_like(age, bool)
    if window is not None:
        visible &= jnp.abs(age) < window
    visible = visible[None] if mask is None else visible[None] & mask
    hidden = jnp.finfo(scores.dtype).min / 2  # finite, for queries that see nothing
    scores = jnp.where(jnp.broadcast_to(visible[:, None, None], scores.shape), cap(scores * scale, soft_cap), hidden)
    if sinks is not None:
        column = sinks.astype(jnp.float32).reshape(1, *scores.shape[1:3], 1, 1)
        scores = jnp.concatenate([scores, jnp.broadcast_to(column, (*scores.shape[:-1], 1))], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., :length].astype(v.dtype)
    return jnp.einsum("bkgqs,bskh->bqkgh", weights, v).reshape(q.shape)
