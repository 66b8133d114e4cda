"""Copies of whole blocks within a pool, whose axis 0 is the block (copy-on-write)."""

from collections.abc import Callable

import jax
from jaxtyping import Array, Int, Shaped

from jaxllm.pallas_kernels import dispatch, native


def copy_blocks(
    pool: Shaped[Array, "blocks ..."],
    moves: Int[Array, "2 n"],
    *,
    implementation: str = "auto",
    platform: str | None = None,
) -> Shaped[Array, "blocks ..."]:
    """The pool with blocks `moves[0]` copied to blocks `moves[1]`, which must be distinct; in place if donated.

    All blocks are read before any is written. Distinct ids past the pool are padding. `platform` is that of the
    pool's only device; None: several devices, or unknown.
    """
    preferred = {"cpu": "native"} if platform == "cpu" and native.is_built() else {}
    return dispatch.choose(IMPLEMENTATIONS, preferred, implementation, platform or "none")(pool, moves)


def _scatter(pool: Array, moves: Array) -> Array:
    contents = pool.at[moves[0]].get(mode="clip")
    return pool.at[moves[1]].set(contents, mode="drop", unique_indices=True)


def _native(pool: Array, moves: Array) -> Array:
    """Copies the real blocks only, with all cores."""
    result = jax.ShapeDtypeStruct(pool.shape, pool.dtype)
    return native.ffi_call("jaxllm_copy_blocks", result, input_output_aliases={0: 0})(pool, moves)


IMPLEMENTATIONS: dict[str, Callable] = {"reference": _scatter, "native": _native}
