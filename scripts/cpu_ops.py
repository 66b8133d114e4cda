"""Attention and loss in forms that keep a CPU busy with matrix products: no array is larger than it must be.

Both compute in float32 and have hand-written gradients that recompute, or never store, what is quadratic.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

LOSS_TOKENS = 512  # whose logits exist at a time; they and their gradient should fit into the cache
QUERY_BLOCK = 128  # queries that attend at a time, to the keys up to the last of them


def _spans(length: int) -> list[tuple[int, int]]:
    return [(begin, min(begin + QUERY_BLOCK, length)) for begin in range(0, length, QUERY_BLOCK)]


def _scores(q: Array, k: Array, begin: int) -> Array:
    """Scaled and masked `[rows, group, queries, keys]`; the first query is at position `begin`."""
    rows, group, queries, dim = q.shape
    x = jnp.einsum("nqd,nkd->nqk", q.reshape(rows, group * queries, dim) * dim**-0.5, k)
    x = x.reshape(rows, group, queries, k.shape[1])
    visible = jnp.arange(k.shape[1])[None] <= begin + jnp.arange(queries)[:, None]
    return jnp.where(visible[None, None], x, -jnp.inf)


def _attend(q: Array, k: Array, v: Array) -> tuple[Array, tuple[Array, ...]]:
    outs, log_norms = [], []
    for begin, end in _spans(q.shape[2]):
        x = _scores(q[:, :, begin:end], k[:, :end], begin)
        highest = x.max(axis=-1, keepdims=True)
        weights = jnp.exp(x - highest)
        norm = weights.sum(axis=-1, keepdims=True)
        out = jnp.einsum("nqk,nkd->nqd", weights.reshape(q.shape[0], -1, end), v[:, :end])
        outs.append(out.reshape(*x.shape[:-1], -1) / norm)
        log_norms.append(highest + jnp.log(norm))
    out, log_norm = jnp.concatenate(outs, axis=2), jnp.concatenate(log_norms, axis=2)
    return out, (q, k, v, out, log_norm)


def _attend_backward(saved: tuple[Array, ...], grad: Array) -> tuple[Array, Array, Array]:
    q, k, v, out, log_norm = saved
    rows, scale = q.shape[0], q.shape[-1] ** -0.5
    mean = (grad * out).sum(axis=-1, keepdims=True)
    q_grads, k_grad, v_grad = [], jnp.zeros_like(k), jnp.zeros_like(v)
    for begin, end in _spans(q.shape[2]):
        block = (slice(None), slice(None), slice(begin, end))
        weights = jnp.exp(_scores(q[block], k[:, :end], begin) - log_norm[block])
        g, flat_q = (x[block].reshape(rows, -1, x.shape[-1]) for x in (grad, q))
        inner = jnp.einsum("nqd,nkd->nqk", g, v[:, :end]).reshape(weights.shape)
        score_grad = (weights * (inner - mean[block]) * scale).reshape(rows, -1, end)
        v_grad = v_grad.at[:, :end].add(jnp.einsum("nqk,nqd->nkd", weights.reshape(rows, -1, end), g))
        k_grad = k_grad.at[:, :end].add(jnp.einsum("nqk,nqd->nkd", score_grad, flat_q))
        q_grads.append(jnp.einsum("nqk,nkd->nqd", score_grad, k[:, :end]).reshape(q[block].shape))
    return jnp.concatenate(q_grads, axis=2), k_grad, v_grad


@jax.custom_vjp
def _causal_attention(q: Array, k: Array, v: Array) -> Array:
    """`q` `[rows, group, len, head_dim]` attends to `k`, `v` `[rows, len, head_dim]`, softmax in blocks of queries."""
    return _attend(q, k, v)[0]


_causal_attention.defvjp(_attend, _attend_backward)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockedDense:
    """What `jaxllm.models.cache.Dense` computes, for plain causal attention."""

    def attend(self, q, k, v, *, scale: float, sliding_window: int | None = None, soft_cap: float | None = None):
        """Attends `q` `[batch, len, heads, head_dim]` to `k`, `v` `[batch, len, kv_heads, head_dim]`."""
        batch, length, heads, dim = q.shape
        if sliding_window is not None or soft_cap is not None or scale != dim**-0.5:
            raise NotImplementedError("BlockedDense has no sliding_window, soft_cap or other scale than head_dim**-0.5")
        kv_heads = k.shape[2]
        q = q.reshape(batch, length, kv_heads, heads // kv_heads, dim).transpose(0, 2, 3, 1, 4)
        q = q.reshape(batch * kv_heads, heads // kv_heads, length, dim)
        k, v = (x.transpose(0, 2, 1, 3).reshape(batch * kv_heads, length, dim) for x in (k, v))
        out = _causal_attention(q, k, v).reshape(batch, heads, length, dim)
        return out.transpose(0, 2, 1, 3), self


def _loss_and_grads(hidden: Array, embed: Array, targets: Array) -> tuple[Array, tuple[Array, Array]]:
    num_tokens, dim = hidden.shape
    chunk = LOSS_TOKENS if num_tokens % LOSS_TOKENS == 0 else num_tokens
    vocab_ids = jnp.arange(embed.shape[0], dtype=targets.dtype)[None]

    def step(carry: tuple[Array, Array], xs: tuple[Array, Array]) -> tuple[tuple[Array, Array], Array]:
        (embed_grad, total), (h, ids) = carry, xs
        logits = jnp.einsum("td,vd->tv", h, embed)
        highest = logits.max(axis=-1, keepdims=True)
        weights = jnp.exp(logits - highest)
        norm = weights.sum(axis=-1, keepdims=True)
        chosen = jnp.take_along_axis(logits, ids[:, None], axis=-1)
        total += (highest + jnp.log(norm) - chosen).sum()
        grad = weights / (norm * num_tokens)
        grad = jnp.where(vocab_ids == ids[:, None], grad - 1 / num_tokens, grad)
        return (embed_grad + jnp.einsum("tv,td->vd", grad, h), total), jnp.einsum("tv,vd->td", grad, embed)

    start = (jnp.zeros_like(embed), jnp.zeros((), hidden.dtype))
    chunks = hidden.reshape(-1, chunk, dim), targets.reshape(-1, chunk)
    (embed_grad, total), hidden_grad = jax.lax.scan(step, start, chunks)
    return total / num_tokens, (hidden_grad.reshape(hidden.shape), embed_grad)


@jax.custom_vjp
def tied_cross_entropy(
    hidden: Float[Array, "tokens embed"], embed: Float[Array, "vocab embed"], targets: Int[Array, " tokens"]
) -> Float[Array, ""]:
    """Mean cross-entropy in nats of `targets` under the logits `hidden @ embed.T`; its gradients, which need the same
    logits, are computed with it."""
    return _loss_and_grads(hidden, embed, targets)[0]


def _loss_backward(grads: tuple[Array, Array], cotangent: Array) -> tuple[Array, Array, None]:
    return grads[0] * cotangent, grads[1] * cotangent, None


tied_cross_entropy.defvjp(_loss_and_grads, _loss_backward)
