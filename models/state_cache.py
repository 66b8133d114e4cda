"""The caches that recurrences run over: `PagedState` (engine) or `DenseState` (training, evaluation).

Both have `scan(step, start, inputs) -> (outputs, cache)`, so that one model class does both.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from jaxllm.models.cache import Dense
from jaxllm.models.cache_spec import CacheSpec
from jaxllm.pallas_kernels.dispatch import UNPLACED, Placement
from jaxllm.pallas_kernels.paged_attention import PagedBatch
from jaxllm.sharding.rules import local_shape, shard_map

Step = Callable[[Array, Any], tuple[Array, Any]]  # a state `[*shape]` and a token's inputs -> the next, and its outputs


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedState:
    """One layer's states of a step's sequences, in blocks: each block has the state that its last token so far has
    left.

    A block's state takes one or several cells, by its bytes: each a page of one of the `pools`, of which several may be
    the same. `pool_axes` are the logical axes of what a page holds.
    """

    pools: tuple[Shaped[Array, "pages ..."], ...]
    pages: tuple[Int[Array, "seqs blocks"], ...]  # of each cell
    cells: tuple[int, ...] = field(metadata={"static": True})  # the pool of each
    batch: PagedBatch  # positions count from the first block of `pages`
    spec: CacheSpec = field(metadata={"static": True})
    pool_axes: tuple[str | None, ...] = field(metadata={"static": True})
    block_size: int = field(metadata={"static": True})
    placement: Placement = field(default=UNPLACED, metadata={"static": True})

    def scan(self, step: Step, start: Shaped[Array, "..."], inputs: Any) -> tuple[Any, "PagedState"]:
        """Runs `step` over the flat tokens of `inputs` `[tokens, ...]`, each sequence from where it was, or from
        `start` at its beginning. Returns the outputs of all tokens. One token after the other, whatever their
        sequence: for long chunks a kernel does better."""
        num_tokens = len(jax.tree.leaves(inputs)[0])
        row, position, is_real = self.batch.token_positions(num_tokens)
        first = self.batch.kv_lens - jnp.diff(self.batch.cu_q_lens)  # of each sequence, its position
        has_begun = jnp.expand_dims(first > 0, tuple(range(1, 1 + start.ndim)))
        states = jnp.where(has_begun, self._load((first - 1) // self.block_size), jnp.broadcast_to(start, start.shape))

        def advance(state: Array, given: Any) -> tuple[Array, tuple[Array, Any]]:
            row, is_first, x = given
            state, y = step(jnp.where(is_first, states[row], state), x)
            return state, (state, y)

        is_first = position == first[row]
        _, (after, outputs) = jax.lax.scan(advance, jnp.zeros_like(start), (row, is_first, inputs))
        is_last = (position + 1 == self.batch.kv_lens[row]) | ((position + 1) % self.block_size == 0)
        return outputs, self._store(after, row, position // self.block_size, is_last & is_real)

    def _load(self, index: Int[Array, " seqs"]) -> Shaped[Array, "seqs ..."]:
        """The states in the blocks at `index` of each sequence."""
        pages = [jnp.take_along_axis(pages, index[:, None], axis=1, mode="clip")[:, 0] for pages in self.pages]
        axes, mesh = (None, *self.pool_axes), self.placement.mesh
        load = shard_map(
            partial(_read, self.cells, local_shape(self.spec.shape, self.spec.axes, mesh), self.spec.dtype),
            mesh,
            in_axes=((None,) * 2, *(axes for _ in self.pools)),
            out_axes=((None, *self.spec.axes),),
        )
        (states,) = load(jnp.stack(pages), *self.pools)
        return states

    def _store(self, states: Array, row: Array, index: Array, is_kept: Array) -> "PagedState":
        """Writes the states of tokens that are kept into their rows' blocks at `index`."""
        end = self.pools[0].shape[0]
        pages = jnp.stack([jnp.where(is_kept, pages[row, index], end) for pages in self.pages])
        axes = (None, *self.pool_axes)
        store = shard_map(
            partial(_write, self.cells),
            self.placement.mesh,
            in_axes=((None,) * 2, (None, *self.spec.axes), *(axes for _ in self.pools)),
            out_axes=tuple(axes for _ in self.pools),
        )
        return replace(self, pools=tuple(store(pages, states, *self.pools)))


def num_cells(shape: Sequence[int], dtype: Any, cell_shape: Sequence[int], cell_dtype: Any) -> int:
    """Cells that a state takes, by its bytes."""
    num_bytes = math.prod(shape) * jnp.dtype(dtype).itemsize
    return -(-num_bytes // (math.prod(cell_shape) * jnp.dtype(cell_dtype).itemsize))


def _read(
    pool_of: Sequence[int], shape: tuple[int, ...], dtype: Any, pages: Int[Array, "cells n"], *pools: Array
) -> tuple[Array]:
    """States `[n, *shape]` from the bytes of their pages."""
    cells = [pools[pool].at[of_cell].get(mode="clip") for pool, of_cell in zip(pool_of, pages, strict=True)]
    if len(cells) == 1 and (cells[0].shape[1:], cells[0].dtype) == (shape, jnp.dtype(dtype)):
        return (cells[0],)
    num_bytes = math.prod(shape) * jnp.dtype(dtype).itemsize
    raw = jnp.concatenate([_bytes(cell) for cell in cells], axis=1)[:, :num_bytes]
    words = raw.reshape(len(raw), *shape, jnp.dtype(dtype).itemsize)
    return (jax.lax.bitcast_convert_type(words if words.shape[-1] > 1 else words[..., 0], dtype),)


def _write(pool_of: Sequence[int], pages: Int[Array, "cells n"], states: Array, *pools: Array) -> tuple[Array, ...]:
    """The pools with the states' bytes in their pages; those past the pool are dropped."""
    if len(pool_of) == 1 and (pools[0].shape[1:], pools[0].dtype) == (states.shape[1:], states.dtype):
        return (pools[0].at[pages[0]].set(states, mode="drop"),)
    raw, written = _bytes(states), list(pools)
    for index, of_cell in zip(pool_of, pages, strict=True):
        pool = written[index]
        size = math.prod(pool.shape[1:]) * pool.dtype.itemsize
        part, raw = raw[:, :size], raw[:, size:]
        part = jnp.pad(part, ((0, 0), (0, size - part.shape[1])))
        cells = part.reshape(len(part), *pool.shape[1:], pool.dtype.itemsize)
        cells = jax.lax.bitcast_convert_type(cells if pool.dtype.itemsize > 1 else cells[..., 0], pool.dtype)
        written[index] = pool.at[of_cell].set(cells, mode="drop")
    return tuple(written)


def _bytes(x: Array) -> Array:
    """`[n, bytes]`"""
    return jax.lax.bitcast_convert_type(x, jnp.uint8).reshape(len(x), -1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DenseState:
    """A recurrence over each row of a batch `[batch, len]` from its beginning; keeps nothing and is differentiable."""

    def scan(self, step: Step, start: Shaped[Array, "..."], inputs: Any) -> tuple[Any, "DenseState"]:
        """Runs `step` over `inputs` `[batch, len, ...]`. Returns the outputs of all tokens."""
        return jax.vmap(lambda row: jax.lax.scan(step, start, row)[1])(inputs), self


def dense_caches(module: Any, dense: Dense | None = None) -> list[Any]:
    """That keep nothing, for each layer of a model: `dense` where it attends (None: `Dense()`)."""
    dense = dense or Dense()
    if not hasattr(module, "cache_specs"):
        return [dense] * len(module.layers)
    each = [[DenseState() if spec.is_state else dense for spec in of_layer] for of_layer in module.cache_specs()]
    return [caches[0] if len(caches) == 1 else caches for caches in each]
