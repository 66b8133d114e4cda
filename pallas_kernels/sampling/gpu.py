"""Sampling on NVIDIA GPUs from A100 on, in Pallas-Triton: one program a row, which it streams a few times from L2.

The largest logits of as many groups as a tile has lanes give a bound that hardly more tokens pass than are wanted; they
are put aside, and everything else happens among them in registers. Only rows where too many pass (nearly flat ones, or
full of ties) are streamed again for each step of a search.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int, UInt32

from jaxllm.pallas_kernels.sampling.gpu_best import best_kernel
from jaxllm.pallas_kernels.sampling.gpu_draw import draw_kernel
from jaxllm.pallas_kernels.sampling.reference import Best, Draws, log_min_p

TILE = 4096  # logits that a program reads at once; as many it can put aside for a draw
KEPT = 256  # that it can put aside for the best tokens
MOST_BEST = 128
PARAMS = plt.CompilerParams(num_warps=16, num_stages=2)


def supports(logits: Array, *others: Any, k: int = 1) -> bool:
    return logits.dtype == jnp.float32 and logits.shape[1] >= 16 and k <= min(MOST_BEST, _tile(logits.shape[1]))


def draw(
    logits: Float[Array, "rows vocab"],
    temperature: Float[Array, " rows"],
    top_k: Int[Array, " rows"],
    top_p: Float[Array, " rows"],
    min_p: Float[Array, " rows"],
    keys: UInt32[Array, "rows 2"],
    *,
    interpret: bool = False,
) -> Draws:
    """See `reference.draw`. Sums, quotients and logarithms may differ by some units in the last place."""
    rows, vocab = logits.shape
    size = _tile(vocab)
    kernel = partial(draw_kernel, vocab=vocab, size=size, partitionable=jax.config.jax_threefry_partitionable)
    columns = [jax.ShapeDtypeStruct((rows,), dtype) for dtype in (jnp.int32, jnp.float32)]
    results = _call(kernel, rows, columns, size, jnp.float32, interpret, "jaxllm_draw")(
        logits, temperature, top_k, top_p, log_min_p(min_p), keys
    )
    return Draws(*results[:2])


def best(
    scores: Float[Array, "rows vocab"],
    logits: Float[Array, "rows vocab"],
    tokens: Int[Array, "rows tokens"],
    *,
    k: int,
    num_rows: Any = None,
    interpret: bool = False,
) -> Best:
    """See `reference.best`."""
    del num_rows  # programs of rows that pad run beside the others
    (rows, vocab), num_tokens = logits.shape, tokens.shape[1]
    width, given = pl.next_power_of_2(k), max(num_tokens, 1)
    tokens = jnp.pad(tokens, ((0, 0), (0, given - num_tokens)))
    kernel = partial(best_kernel, vocab=vocab, size=_tile(vocab), k=k)
    widths = ((width, jnp.int32), (width, jnp.float32), (width, jnp.float32), (width, jnp.int32))
    widths += ((given, jnp.float32), (given, jnp.int32))
    shapes = [jax.ShapeDtypeStruct((rows, width), dtype) for width, dtype in widths]
    call = _call(kernel, rows, shapes, KEPT, jnp.int32, interpret, "jaxllm_best", spare=_tile(vocab))
    ids, found, own, ranks, given_logits, given_ranks, *_ = call(scores, logits, tokens)
    return Best(
        ids[:, :k],
        found[:, :k],
        jnp.concatenate([own[:, :k], given_logits[:, :num_tokens]], axis=1),
        jnp.concatenate([ranks[:, :k], given_ranks[:, :num_tokens]], axis=1),
    )


def _tile(vocab: int) -> int:
    return min(TILE, pl.next_power_of_2(vocab + 1) // 2)


def _call(
    kernel: Any, rows: int, results: list, kept: int, dtype: Any, interpret: bool, name: str, spare: int | None = None
) -> Any:
    """A call with one program a row, and a place in memory where each puts values and ids aside."""
    # Lanes that store nothing need a place of their own where the interpreter, which knows no masks, writes them.
    width = kept + (kept if spare is None else spare) if interpret else kept
    aside = [jax.ShapeDtypeStruct((rows, width), kind) for kind in (dtype, jnp.int32)]
    return pl.pallas_call(
        partial(kernel, kept=kept, interpret=interpret),
        out_shape=(*results, *aside),
        grid=(rows,),
        name=name,
        compiler_params=PARAMS,
        interpret=interpret,
    )
