"""What a model knows of its tokens beside their ids."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxllm.pallas_kernels.addition import add
from jaxllm.pallas_kernels.dispatch import UNPLACED, Placement
from jaxllm.pallas_kernels.rounding import rounded


class LastTokens(NamedTuple):
    """The tokens whose final hidden states are read: the last one of each sequence, or all."""

    all: Bool[Array, ""]
    index: Int[Array, " rows"]  # among flat tokens
    num_rows: Int[Array, ""]  # the others pad


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepContext:
    """Passed through all layers of a step.

    `rows` and `positions` are each token's sequence and place in it. `adapters` are the ids of the rows' adapters
    (None: nobody has one), which mean something to the adapters alone. `is_token` is False for padding, on which
    nothing need be spent (None: there is none); it comes last, from the token `num_tokens` on, if that is known.
    `placement` says where the arrays lie. `read` is for the last layer (None: all of its results are read).
    """

    positions: Int[Array, "*t"]
    rows: Int[Array, "*t"]
    adapters: Int[Array, " rows"] | None = None
    is_token: Bool[Array, "*t"] | None = None
    num_tokens: Int[Array, ""] | None = None
    read: LastTokens | None = None
    placement: Placement = field(default=UNPLACED, metadata={"static": True})

    @classmethod
    def of(
        cls,
        tokens: Int[Array, "*t"],
        *,
        segment_ids: Int[Array, "*t"] | None = None,
        adapters: Int[Array, " rows"] | None = None,
        placement: Placement = UNPLACED,
    ) -> "StepContext":
        """Of whole sequences `[len]` or `[batch, len]`, as in training and evaluation. `segment_ids` number the texts
        that are packed into a row, one after the other: positions count from the beginning of each, and 0 is padding,
        on either side. `Dense` takes the same, and must be given them, too."""
        index = jnp.broadcast_to(jnp.arange(tokens.shape[-1], dtype=jnp.int32), tokens.shape)
        positions, is_token = index, None
        if segment_ids is not None:
            before = jnp.concatenate([segment_ids[..., :1], segment_ids[..., :-1]], axis=-1)
            starts = jnp.where(segment_ids != before, index, 0)
            positions = index - jax.lax.cummax(starts, axis=starts.ndim - 1)
            is_token = segment_ids != 0
        rows = jnp.zeros(tokens.shape, jnp.int32)
        if tokens.ndim == 2:
            rows = jnp.broadcast_to(jnp.arange(len(tokens), dtype=jnp.int32)[:, None], tokens.shape)
        return cls(positions, rows, adapters, is_token, placement=placement)

    @property
    def is_packed(self) -> bool:
        """Whether rows hold several texts, by `segment_ids`; an engine's steps have the number of their tokens."""
        return self.is_token is not None and self.num_tokens is None

    @property
    def token_adapters(self) -> Int[Array, "*t"] | None:
        """The adapter of each token."""
        return None if self.adapters is None else self.adapters[self.rows]

    def rounded_once(self, fn: Callable[..., Array], *arrays: Float[Array, "..."]) -> Float[Array, "..."]:
        """`fn(*arrays)`, element by element, in their dtype; in a batch-invariant step in float32, and rounded at the
        end whatever XLA runs it with."""
        if not self.placement.batch_invariant:
            return fn(*arrays)
        return rounded(fn(*(x.astype(jnp.float32) for x in arrays)), arrays[0].dtype)

    def add(self, x: Float[Array, "*t d"], h: Float[Array, "*t d"]) -> Float[Array, "*t d"]:
        """`x + h`, as by `rounded_once`; of padding, anything."""
        return add(x, h, num_tokens=self.num_tokens, placement=self.placement)

    def finish(self, rest: Callable[..., Array], *arrays: Float[Array, "*t _"]) -> Float[Array, "*t _"]:
        """`rest(*arrays, ctx)`, which computes each token by itself: in the last layer only for the tokens that are
        read, if that is known, and others get what another one's is."""
        read = self.read
        if read is None:
            return rest(*arrays, self)
        some = replace(self.at(read.index), num_tokens=read.num_rows, read=None)
        return jax.lax.cond(
            read.all,
            lambda: rest(*arrays, replace(self, read=None)),
            lambda: rest(*(x[read.index] for x in arrays), some)[self.rows],
        )

    def at(self, index: Int[Array, " n"]) -> "StepContext":
        """Of the tokens at `index` among flat ones."""
        is_token = None if self.is_token is None else self.is_token[index]
        return replace(self, positions=self.positions[index], rows=self.rows[index], is_token=is_token, num_tokens=None)
