"""The functions that run on the device, and their lowering. Each takes the state it writes donated."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from jaxllm.engine.config import EngineConfig
from jaxllm.engine.device import block_moves
from jaxllm.engine.device.logprobs import logprob_rows
from jaxllm.engine.device.packing import ADMIT_SIZES, FROM_SLOT, AdmitLayout, PenaltyLayout, StepLayout
from jaxllm.engine.device.sampler import mask_logits, sample, sample_full
from jaxllm.engine.device.state import (
    PENALTY_AXES,
    DeviceState,
    PenaltyState,
    SamplingTable,
    Slots,
    empty_penalties,
    empty_slots,
    install_penalties,
    install_rows,
)
from jaxllm.grammar.matcher import mask_words
from jaxllm.models.cache import Paged
from jaxllm.models.context import StepContext
from jaxllm.pallas_kernels.dispatch import UNPLACED, Placement
from jaxllm.pallas_kernels.paged_attention import KV_AXES, PagedBatch, kv_shape
from jaxllm.sharding.mesh import platform_of
from jaxllm.sharding.rules import replicated, sharding


@dataclass(frozen=True)
class ModelShape:
    """A model as the executables see it: NNX graph, shapes and shardings of the leaves, sizes of the KV pool."""

    graph: nnx.GraphDef
    treedef: Any  # of the parameters; the executables take flat leaves, which cost no flattening a step
    leaves: Sequence[jax.ShapeDtypeStruct]  # with shardings
    num_layers: int
    kv_heads: int
    head_dim: int
    vocab: int
    token_widths: tuple[int, ...]  # elements of a token: the residual stream, then a layer's intermediate results
    dtype: Any

    def model(self, leaves: Sequence[Array]) -> Any:
        return nnx.merge(self.graph, jax.tree.unflatten(self.treedef, leaves))

    @property
    def hidden(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype of one token's hidden state."""
        return jax.ShapeDtypeStruct((self.token_widths[0],), self.dtype)


def step(
    leaves: Sequence[Array],
    kv_pools: list[Array],
    slots: Slots,
    last_hidden: Float[Array, "max_tokens embed"],
    packed: Int[Array, " size"],
    *,
    model_shape: ModelShape,
    layout: StepLayout,
    placement: Placement,
) -> tuple[list[Array], Slots, Array, Float[Array, "seqs vocab"], Int[Array, " seqs"]]:
    """One forward pass over a ragged batch. Returns pools, slots, hidden states, the logits of each sample, and the
    samples' slots."""
    given = layout.unpack(packed)
    slot_of_new, index, block = given.new_blocks
    slots = slots._replace(block_table=slots.block_table.at[slot_of_new, index].set(block, mode="drop"))

    def of_rows(column: Array) -> Array:
        return column.at[given.slots].get(mode="clip")

    cu_q_lens = jnp.pad(jnp.cumsum(given.q_lens), (1, 0))
    kv_lens = of_rows(slots.length) + given.q_lens
    batch = PagedBatch(of_rows(slots.block_table), cu_q_lens, kv_lens, given.counts[:2])
    row, positions, _ = batch.token_positions(layout.tokens)
    tokens = jnp.where(given.tokens == FROM_SLOT, of_rows(slots.last_token)[row], given.tokens)

    model = model_shape.model(leaves)
    ctx = StepContext(positions, row, placement=placement)
    hidden, caches = model(tokens, ctx, [Paged(pool, batch, placement) for pool in kv_pools])
    last = jnp.maximum(cu_q_lens[1:] - 1, 0)  # token of each row
    sampled = last[given.sample_rows]
    logits = model.logits(hidden[sampled], ctx.at(sampled))
    slots = slots._replace(length=slots.length.at[given.slots].add(given.q_lens, mode="drop"))
    last_hidden = jax.lax.dynamic_update_slice_in_dim(last_hidden, hidden, 0, 0)
    return [cache.kv_pool for cache in caches], slots, last_hidden, logits, given.sample_slots


def sample_step(
    last_token: Int[Array, " slots"],
    lengths: Int[Array, " slots"],
    table: SamplingTable,
    logits: Float[Array, "seqs vocab"],
    sample_slots: Int[Array, " seqs"],
    *,
    placement: Placement = UNPLACED,
) -> tuple[Int[Array, " slots"], Int[Array, " seqs"]]:
    """Samples every row, and writes the tokens of rows that are no padding into the slot table."""
    tokens = sample(logits, sample_slots, lengths, table, placement=placement)
    return last_token.at[sample_slots].set(tokens, mode="drop"), tokens


def sample_full_step(
    last_token: Int[Array, " slots"],
    penalties: PenaltyState,
    lengths: Int[Array, " slots"],
    table: SamplingTable,
    logits: Float[Array, "seqs vocab"],
    allowed: Float[Array, "seqs vocab"],
    sample_slots: Int[Array, " seqs"],
    *,
    placement: Placement = UNPLACED,
) -> tuple[Int[Array, " slots"], PenaltyState, Int[Array, "seqs width"], Int[Array, "seqs candidates_width"]]:
    """Likewise, from `allowed`: the logits after the masks of grammars, or the same once more. Each row of the result
    is a token, then its log-probabilities. Beams' candidates are apart, as they are read only if there are beams."""
    tokens, penalties, rows, candidates = sample_full(
        logits, sample_slots, lengths, table, penalties, allowed=allowed, placement=placement
    )
    last_token = last_token.at[sample_slots].set(tokens, mode="drop")
    return last_token, penalties, jnp.concatenate([tokens[:, None], rows], 1), candidates


def prompt_logprobs(
    leaves: Sequence[Array],
    hidden: Float[Array, "max_tokens embed"],
    packed: Int[Array, "2 rows"],
    *,
    model_shape: ModelShape,
    placement: Placement = UNPLACED,
) -> Int[Array, "rows width"]:
    """Log-probabilities of prompt tokens: of `packed[1]` after the step's tokens at `packed[0]`."""
    ctx = StepContext.of(packed[0], placement=placement)  # the head reads neither rows nor positions
    logits = model_shape.model(leaves).logits(hidden.at[packed[0]].get(mode="clip"), ctx)
    return logprob_rows(logits, packed[1], placement=placement)


def admit(
    slots: Slots, sampling: SamplingTable, packed: Int[Array, "rows size"], *, layout: AdmitLayout
) -> tuple[Slots, SamplingTable]:
    return install_rows(slots, sampling, layout.unpack(packed))


@dataclass(frozen=True)
class Lowering:
    """Lowers each function for its shapes, with every argument's and result's sharding pinned."""

    model_shape: ModelShape
    config: EngineConfig
    mesh: Mesh

    @property
    def placement(self) -> Placement:
        return Placement(self.mesh)

    def jobs(self, layouts: Sequence[StepLayout]) -> dict[Hashable, Callable[[], jax.stages.Lowered]]:
        """Name -> lowering of every executable: (number of T) + 3 x (number of S), the admits, three more, and those
        that move blocks.

        Smallest first: the first four suffice to serve a request.
        """
        jobs: dict[Hashable, Callable[[], jax.stages.Lowered]] = {"init": self.lower_init}
        admits = {("admit", rows): partial(self.lower_admit, rows) for rows in ADMIT_SIZES}
        jobs["admit", 1] = admits["admit", 1]
        moves = block_moves.jobs(self.state().kv_pools, self.config.max_num_seqs)
        for layout in layouts:
            jobs["step", layout.tokens] = partial(self.lower_step, layout)
            jobs.setdefault(("sample", layout.seqs, False), partial(self.lower_sample, layout.seqs))
            jobs.setdefault(("sample", layout.seqs, True), partial(self.lower_sample_full, layout.seqs))
            jobs.setdefault(("mask", layout.seqs), partial(self.lower_mask, layout.seqs))
            jobs |= {"penalties": self.lower_penalties, "prompt_logprobs": self.lower_prompt_logprobs} | admits
            jobs |= {name: job for name, job in moves.items() if name[0] == "copy"}
        return jobs | moves  # swaps last: until then, preempted sequences are recomputed

    def state(self) -> DeviceState:
        """The shapes of the state, with shardings."""
        shape, config = self.model_shape, self.config
        platform = platform_of(self.mesh)
        pool = kv_shape(config.num_blocks, config.block_size, shape.kv_heads, shape.head_dim, platform=platform)
        pool = self._like(pool, shape.dtype, KV_AXES)
        return DeviceState([pool] * shape.num_layers, *self.small_state())

    def small_state(self) -> tuple[Slots, SamplingTable, PenaltyState, jax.ShapeDtypeStruct]:
        """Shapes of the state without the KV pools."""
        shape, config = self.model_shape, self.config
        slots, sampling = jax.eval_shape(partial(empty_slots, config.max_num_seqs, config.blocks_per_seq))
        slots, sampling = jax.tree.map(lambda x: self._like(x.shape, x.dtype), (slots, sampling))
        penalties = jax.eval_shape(partial(empty_penalties, config.max_num_seqs, shape.vocab))
        penalties = PenaltyState(
            *(self._like(x.shape, x.dtype, axes) for x, axes in zip(penalties, PENALTY_AXES, strict=True))
        )
        hidden = self._like((config.max_num_batched_tokens, *shape.hidden.shape), shape.hidden.dtype)
        return slots, sampling, penalties, hidden

    def lower_init(self) -> jax.stages.Lowered:
        state = self.state()

        def init() -> DeviceState:
            pools = [jnp.zeros(pool.shape, pool.dtype) for pool in state.kv_pools]
            slots = empty_slots(self.config.max_num_seqs, self.config.blocks_per_seq)
            penalties = empty_penalties(self.config.max_num_seqs, self.model_shape.vocab)
            return DeviceState(pools, *slots, penalties, jnp.zeros(state.hidden.shape, state.hidden.dtype))

        return jax.jit(init, out_shardings=jax.tree.map(lambda x: x.sharding, state)).lower()

    def lower_step(self, layout: StepLayout) -> jax.stages.Lowered:
        state = self.state()
        fn = partial(step, model_shape=self.model_shape, layout=layout, placement=self.placement)
        everywhere = replicated(self.mesh)
        out = (
            [pool.sharding for pool in state.kv_pools],
            jax.tree.map(lambda _: everywhere, state.slots),
            everywhere,
            self._logits(layout.seqs).sharding,
            everywhere,
        )
        jitted = jax.jit(fn, donate_argnums=(1, 2, 3), out_shardings=out)
        leaves, packed = list(self.model_shape.leaves), self._ints(layout.size)
        return jitted.lower(leaves, state.kv_pools, state.slots, state.hidden, packed)

    def lower_sample(self, seqs: int) -> jax.stages.Lowered:
        slots, sampling, _, _ = self.small_state()
        fn = partial(sample_step, placement=self.placement)
        jitted = jax.jit(fn, donate_argnums=0, out_shardings=(replicated(self.mesh),) * 2)
        return jitted.lower(slots.last_token, slots.length, sampling, self._logits(seqs), self._ints(seqs))

    def lower_sample_full(self, seqs: int) -> jax.stages.Lowered:
        slots, sampling, penalties, _ = self.small_state()
        everywhere = replicated(self.mesh)
        out = (everywhere, jax.tree.map(lambda x: x.sharding, penalties), everywhere, everywhere)
        fn = partial(sample_full_step, placement=self.placement)
        jitted = jax.jit(fn, donate_argnums=(0, 1), out_shardings=out)
        logits = self._logits(seqs)
        return jitted.lower(slots.last_token, penalties, slots.length, sampling, logits, logits, self._ints(seqs))

    def lower_mask(self, seqs: int) -> jax.stages.Lowered:
        logits = self._logits(seqs)
        jitted = jax.jit(mask_logits, out_shardings=logits.sharding)
        return jitted.lower(logits, self._ints(seqs, mask_words(self.model_shape.vocab)))

    def lower_penalties(self) -> jax.stages.Lowered:
        layout = PenaltyLayout(self.model_shape.vocab)
        _, _, penalties, _ = self.small_state()
        out = jax.tree.map(lambda x: x.sharding, penalties)
        jitted = jax.jit(
            lambda penalties, packed: install_penalties(penalties, layout.unpack(packed)),
            donate_argnums=0,
            out_shardings=out,
        )
        return jitted.lower(penalties, self._ints(layout.size))

    def lower_prompt_logprobs(self) -> jax.stages.Lowered:
        *_, hidden = self.small_state()
        fn = partial(prompt_logprobs, model_shape=self.model_shape, placement=self.placement)
        jitted = jax.jit(fn, out_shardings=replicated(self.mesh))
        return jitted.lower(list(self.model_shape.leaves), hidden, self._ints(2, self.config.max_num_seqs))

    def lower_admit(self, rows: int) -> jax.stages.Lowered:
        layout = AdmitLayout(rows, self.config.max_num_seqs, self.config.blocks_per_seq)
        (slots, sampling, _, _), everywhere = self.small_state(), replicated(self.mesh)
        jitted = jax.jit(partial(admit, layout=layout), donate_argnums=(0, 1), out_shardings=everywhere)
        return jitted.lower(slots, sampling, self._ints(rows, layout.size))

    def _like(self, shape: Sequence[int], dtype: Any, axes: Sequence[str | None] | None = None) -> jax.ShapeDtypeStruct:
        place = replicated(self.mesh) if axes is None else sharding(axes, self.mesh)
        return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=place)

    def _ints(self, *shape: int) -> jax.ShapeDtypeStruct:
        return self._like(shape, jnp.int32)

    def _logits(self, seqs: int) -> jax.ShapeDtypeStruct:
        return self._like((seqs, self.model_shape.vocab), jnp.float32, (None, "vocab"))
