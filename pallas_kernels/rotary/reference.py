"""Defines rotary position embeddings of heads, in jnp."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float


def rotate(
    x: Float[Array, "*t heads head_dim"], sin: Array, cos: Array, *, interleaved: bool = False, num_tokens: Any = None
) -> Float[Array, "*t heads head_dim"]:
    """Turns the first `2 * sin.shape[-1]` features of each head, in float32; see `jaxllm.models.rope.Rope`."""
    del num_tokens  # padding costs no kernel of its own
    turned = 2 * sin.shape[-1]
    x32 = x[..., :turned].astype(jnp.float32)
    if interleaved:  # neighbours change places by rolls: an axis of two would waste a TPU's lanes
        is_first = jnp.broadcast_to(jnp.arange(turned) % 2 == 0, x32.shape)
        other = jnp.where(is_first, -jnp.roll(x32, -1, axis=-1), jnp.roll(x32, 1, axis=-1))
        y = (x32 * jnp.repeat(cos, 2, axis=-1) + other * jnp.repeat(sin, 2, axis=-1)).astype(x.dtype)
    else:
        x1, x2 = jnp.split(x32, 2, axis=-1)
        y = jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1).astype(x.dtype)
    return y if turned == x.shape[-1] else jnp.concatenate([y, x[..., turned:]], axis=-1)


def rotate_qkv(
    qkv: Float[Array, "*t kv_heads members head_dim"],
    sin: Array,
    cos: Array,
    *,
    interleaved: bool = False,
    num_tokens: Any = None,
) -> tuple[Array, Array, Array]:
    """Queries, keys and values apart, the former two rotated. The members of each KV head are its queries, its key and
    its value."""
    q, k, v = qkv[..., :-2, :], qkv[..., -2, :], qkv[..., -1, :]
    options = {"interleaved": interleaved, "num_tokens": num_tokens}
    q = q.reshape(*q.shape[:-3], -1, q.shape[-1])
    return rotate(q, sin, cos, **options), rotate(k, sin, cos, **options), v
