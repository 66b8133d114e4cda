"""The caches that attention runs over: `Paged` keys and values (engine) or `Dense` ones (training, evaluation).

Both have `attend(q, k, v, *, scale, sliding_window, soft_cap) -> (out, cache)`, so that one model class does both.
"""

from dataclasses import dataclass, field, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from jaxllm.pallas_kernels.paged_attention import KV_AXES, ragged_paged_attention
from jaxllm.pallas_kernels.paged_attention.reference import cap, token_positions
from jaxllm.sharding.mesh import platform_of
from jaxllm.sharding.rules import shard_map


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedBatch:
    """The sequences and positions of a step's flat tokens; `ragged_paged_attention` documents each field."""

    block_tables: Int[Array, "seqs blocks_per_seq"]
    cu_q_lens: Int[Array, " seqs_plus_1"]
    kv_lens: Int[Array, " seqs"]
    distribution: Int[Array, "2"]

    def token_positions(self, tokens: int) -> tuple[Int[Array, " tokens"], Int[Array, " tokens"]]:
        """The row and the position of each of `tokens` flat tokens; 0 and 0 for padding."""
        seq, positions, _ = token_positions(self.cu_q_lens, self.kv_lens, self.distribution, tokens)
        return seq, positions


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Paged:
    """One layer's pool of KV blocks, and the step's batch."""

    kv_pool: Float[Array, "blocks 2 kv_heads block_size head_dim"]
    batch: PagedBatch
    mesh: Mesh = field(metadata={"static": True})

    def attend(self, q, k, v, *, scale: float, sliding_window: int | None = None, soft_cap: float | None = None):
        """Writes `k`, `v` `[tokens, kv_heads, head_dim]`, attends `q` `[tokens, heads, head_dim]`."""
        heads, kv = (None, "heads", None), (None, "kv_heads", None)
        op = partial(
            ragged_paged_attention,
            platform=platform_of(self.mesh),
            scale=scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
        )
        op = shard_map(
            op,
            self.mesh,
            in_axes=(heads, kv, kv, KV_AXES, (None, None), (None,), (None,), (None,)),
            out_axes=(heads, KV_AXES),
        )
        b = self.batch
        out, pool = op(q, k, v, self.kv_pool, b.block_tables, b.cu_q_lens, b.kv_lens, b.distribution)
        return out, replace(self, kv_pool=pool)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Dense:
    """Causal attention within each row of a batch `[batch, len]`; keeps nothing and is differentiable."""

    def attend(self, q, k, v, *, scale: float, sliding_window: int | None = None, soft_cap: float | None = None):
        """Attends `q` `[batch, len, heads, head_dim]` to `k`, `v` `[batch, len, kv_heads, head_dim]`."""
        if soft_cap is not None:
            return _capped_attention(q, k, v, scale, sliding_window, soft_cap), self
        window = None if sliding_window is None else (sliding_window - 1, 0)
        out = jax.nn.dot_product_attention(q, k, v, scale=scale, is_causal=True, local_window_size=window)
        return out, self


def _capped_attention(q: Array, k: Array, v: Array, scale: float, window: int | None, soft_cap: float) -> Array:
    """`jax.nn.dot_product_attention` with soft-capped scores, which it does not support."""
    batch, length, heads, head_dim = q.shape
    grouped = q.reshape(batch, length, k.shape[2], -1, head_dim)
    scores = jnp.einsum("bqkgh,bskh->bkgqs", grouped, k, preferred_element_type=jnp.float32)
    index = jnp.arange(length)
    age = index[:, None] - index[None]
    visible = age >= 0 if window is None else (age >= 0) & (age < window)
    scores = jnp.where(jnp.broadcast_to(visible, scores.shape), cap(scores * scale, soft_cap), -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bkgqs,bskh->bqkgh", weights, v).reshape(q.shape)
