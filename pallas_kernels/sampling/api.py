"""Sampling: the draw of a token, the best ones, and the normaliser of each row of logits."""

from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from jaxllm.pallas_kernels.dispatch import UNPLACED, Op, Placement
from jaxllm.pallas_kernels.row_sums import row_sums
from jaxllm.pallas_kernels.sampling.reference import Best, Draws, Rows, Total, in_any_order

GPU_TOP_K = 16  # XLA sorts whole rows on a GPU for more at once

_op = partial(Op, package=__package__ or "")
_ALL, _BOTH = ("reference", "native", "gpu"), {"cpu": ("native",), "gpu": ("gpu",)}
NORMALIZE = _op(name="normalize", implementations=_ALL[:2], preferred={"cpu": ("native",)})  # XLA does it well on a GPU
DRAW = _op(name="draw", implementations=_ALL, preferred=_BOTH, on_mesh={"gpu": ("gpu",)})
# XLA finds the best on several GPUs: compiling the full sampler with the kernel for two H200s crashes it (JAX 0.11.2).
BEST = _op(name="best", implementations=_ALL, preferred=_BOTH)


def normalize(
    logits: Float[Array, "rows vocab"],
    *,
    num_rows: Int[Array, ""] | None = None,
    implementation: str = "auto",
    placement: Placement = UNPLACED,
) -> Rows:
    """The largest logit of each row, and the log of the sum of their exponentials. Rows from `num_rows` on, if that is
    given, are padding, whose results may be anything."""
    fn = _with_total(NORMALIZE.choose(implementation, placement, logits), placement)
    return fn(logits, num_rows=num_rows)


def draw(
    logits: Float[Array, "rows vocab"],
    temperature: Float[Array, " rows"],
    top_k: Int[Array, " rows"],
    top_p: Float[Array, " rows"],
    min_p: Float[Array, " rows"],
    keys: UInt32[Array, "rows 2"],
    *,
    implementation: str = "auto",
    placement: Placement = UNPLACED,
    on_each: Callable[[Callable], Callable] = lambda fn: fn,
) -> Draws:
    """A token for each row; see `reference.draw`. Each of several GPUs does all the work: `on_each` makes a function
    run on each, which then gets all logits."""
    arrays = logits, temperature, top_k, top_p, min_p, keys
    fn = DRAW.choose(implementation, placement, *arrays)
    fn = on_each(fn) if fn.__module__.endswith(".gpu") else _with_total(fn, placement)
    return Draws(*fn(*arrays))


def best(
    scores: Float[Array, "rows vocab"],
    logits: Float[Array, "rows vocab"],
    k: int,
    tokens: Int[Array, "rows tokens"] | None = None,
    *,
    num_rows: Int[Array, ""] | None = None,
    implementation: str = "auto",
    placement: Placement = UNPLACED,
) -> Best:
    """The k best tokens of each row, and some given ones; see `reference.best`. Rows from `num_rows` on, if that is
    given, are padding, whose results may be anything."""
    if tokens is None:
        tokens = jnp.zeros((logits.shape[0], 0), jnp.int32)
    fn = BEST.choose(implementation, placement, scores, logits, tokens, k=k)
    if placement.platform == "gpu" and not placement.single_device and fn.__module__.endswith(".reference"):
        fn = partial(fn, at_once=GPU_TOP_K)
    return fn(scores, logits, tokens, k=k, num_rows=num_rows)


def total_of(placement: Placement) -> Total:
    """How rows are summed there: in an order that depends on no other row if it asks for that, else in XLA's."""
    return partial(_in_order, placement=placement) if placement.batch_invariant else in_any_order


def _in_order(x: Float[Array, "rows vocab"], *, placement: Placement) -> Float[Array, " rows"]:
    return row_sums(x, placement=placement)[:, 0]


def _with_total(fn: Callable, placement: Placement) -> Callable:
    """`fn` with the sums that `placement` asks for; a kernel sums a row by itself, in an order of its own."""
    is_reference = fn.__module__.endswith(".reference")
    return partial(fn, total=total_of(placement)) if placement.batch_invariant and is_reference else fn
