"""The functions that run on the device, and how each is lowered. Every writer of the state takes it donated."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from jaxllm.engine.batch import ADMIT_SIZES, FROM_SLOT, AdmitLayout, StepLayout
from jaxllm.engine.config import EngineConfig
from jaxllm.engine.sampler import sample
from jaxllm.engine.state import DeviceState, SamplingTable, Slots, empty_slots, install_rows
from jaxllm.models.cache import Paged, PagedBatch
from jaxllm.pallas_kernels.paged_attention import KV_AXES, kv_shape
from jaxllm.sharding.rules import replicated, sharding


@dataclass(frozen=True)
class ModelShape:
    """What the executables need to know of a model: its NNX graph, the leaves' places, and the pool's sizes."""

    graph: nnx.GraphDef
    treedef: Any  # of the parameters; the executables take flat leaves, which cost no flattening a step
    leaves: Sequence[jax.ShapeDtypeStruct]  # with shardings
    num_layers: int
    kv_heads: int
    head_dim: int
    vocab: int
    token_widths: tuple[int, ...]  # elements a token takes: of the residual stream, then of what a layer computes
    dtype: Any


def step(
    leaves: Sequence[Array],
    kv_pools: list[Array],
    slots: Slots,
    packed: Int[Array, " size"],
    *,
    model_shape: ModelShape,
    layout: StepLayout,
    mesh: Mesh,
) -> tuple[list[Array], Slots, Float[Array, "seqs vocab"], Int[Array, " seqs"]]:
    """One forward pass over a ragged batch; logits of each row's last token, and the slots of rows that sample."""
    given = layout.unpack(packed)
    slot_of_new, index, block = given.new_blocks
    slots = slots._replace(block_table=slots.block_table.at[slot_of_new, index].set(block, mode="drop"))

    def of_rows(column: Array) -> Array:
        return column.at[given.slots].get(mode="clip")

    cu_q_lens = jnp.pad(jnp.cumsum(given.q_lens), (1, 0))
    kv_lens = of_rows(slots.length) + given.q_lens
    batch = PagedBatch(of_rows(slots.block_table), cu_q_lens, kv_lens, given.counts[:2])
    row, positions = batch.token_positions(layout.tokens)
    tokens = jnp.where(given.tokens == FROM_SLOT, of_rows(slots.last_token)[row], given.tokens)

    model = nnx.merge(model_shape.graph, jax.tree.unflatten(model_shape.treedef, leaves))
    hidden, caches = model(tokens, positions, [Paged(pool, batch, mesh) for pool in kv_pools])
    logits = model.logits(hidden[jnp.maximum(cu_q_lens[1:] - 1, 0)])
    slots = slots._replace(length=slots.length.at[given.slots].add(given.q_lens, mode="drop"))
    sample_slots = jnp.where(given.samples > 0, given.slots, layout.max_num_seqs)
    return [cache.kv_pool for cache in caches], slots, logits, sample_slots


def sample_step(
    last_token: Int[Array, " slots"],
    lengths: Int[Array, " slots"],
    table: SamplingTable,
    logits: Float[Array, "seqs vocab"],
    sample_slots: Int[Array, " seqs"],
    *,
    full: bool,
) -> tuple[Int[Array, " slots"], Int[Array, " seqs"]]:
    """Samples every row, and writes the tokens of those that count into the slot table."""
    tokens = sample(logits, sample_slots, lengths, table, full=full)
    return last_token.at[sample_slots].set(tokens, mode="drop"), tokens


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

    def jobs(self, layouts: Sequence[StepLayout]) -> dict[Hashable, Callable[[], jax.stages.Lowered]]:
        """Name -> lowering of every executable: (number of T) + 2 x (number of S) + the admits + the empty state.

        Smallest first: after the first three a request can be served.
        """
        jobs: dict[Hashable, Callable[[], jax.stages.Lowered]] = {"init": self.lower_init}
        admits = {("admit", rows): partial(self.lower_admit, rows) for rows in ADMIT_SIZES}
        jobs["admit", 1] = admits["admit", 1]
        for layout in layouts:
            jobs["step", layout.tokens] = partial(self.lower_step, layout)
            for full in (False, True):
                jobs.setdefault(("sample", layout.seqs, full), partial(self.lower_sample, layout.seqs, full))
            jobs.update(admits)
        return jobs

    def state(self) -> DeviceState:
        """The shapes of the state, with shardings."""
        shape, config = self.model_shape, self.config
        pool = kv_shape(config.num_blocks, config.block_size, shape.kv_heads, shape.head_dim)
        pool = self._like(pool, shape.dtype, KV_AXES)
        slots, sampling = jax.eval_shape(partial(empty_slots, config.max_num_seqs, config.blocks_per_seq))
        slots, sampling = jax.tree.map(lambda x: self._like(x.shape, x.dtype), (slots, sampling))
        return DeviceState([pool] * shape.num_layers, slots, sampling)

    def lower_init(self) -> jax.stages.Lowered:
        state = self.state()

        def init() -> DeviceState:
            pools = [jnp.zeros(pool.shape, pool.dtype) for pool in state.kv_pools]
            return DeviceState(pools, *empty_slots(self.config.max_num_seqs, self.config.blocks_per_seq))

        return jax.jit(init, out_shardings=jax.tree.map(lambda x: x.sharding, state)).lower()

    def lower_step(self, layout: StepLayout) -> jax.stages.Lowered:
        state = self.state()
        fn = partial(step, model_shape=self.model_shape, layout=layout, mesh=self.mesh)
        everywhere = replicated(self.mesh)
        out = (
            [pool.sharding for pool in state.kv_pools], jax.tree.map(lambda _: everywhere, state.slots),
            self._logits(layout.seqs).sharding, everywhere,
        )  # fmt: skip
        jitted = jax.jit(fn, donate_argnums=(1, 2), out_shardings=out)
        return jitted.lower(list(self.model_shape.leaves), state.kv_pools, state.slots, self._ints(layout.size))

    def lower_sample(self, seqs: int, full: bool) -> jax.stages.Lowered:
        state = self.state()
        jitted = jax.jit(
            partial(sample_step, full=full), donate_argnums=0, out_shardings=(replicated(self.mesh),) * 2
        )
        slots = state.slots
        return jitted.lower(slots.last_token, slots.length, state.sampling, self._logits(seqs), self._ints(seqs))

    def lower_admit(self, rows: int) -> jax.stages.Lowered:
        layout = AdmitLayout(rows, self.config.max_num_seqs, self.config.blocks_per_seq)
        state, everywhere = self.state(), replicated(self.mesh)
        jitted = jax.jit(partial(admit, layout=layout), donate_argnums=(0, 1), out_shardings=everywhere)
        return jitted.lower(state.slots, state.sampling, self._ints(rows, layout.size))

    def _like(self, shape: Sequence[int], dtype: Any, axes: Sequence[str | None] | None = None) -> jax.ShapeDtypeStruct:
        place = replicated(self.mesh) if axes is None else sharding(axes, self.mesh)
        return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=place)

    def _ints(self, *shape: int) -> jax.ShapeDtypeStruct:
        return self._like(shape, jnp.int32)

    def _logits(self, seqs: int) -> jax.ShapeDtypeStruct:
        return self._like((seqs, self.model_shape.vocab), jnp.float32, (None, "vocab"))
