"""The engine's state on the device: the KV pool and the slot table. Passed in, donated, returned."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from jaxllm.engine.batch import NUM_STOP_IDS, SlotRow


class Slots(NamedTuple):
    """What every step reads and writes of a running sequence. The host is the allocator, this its mirror."""

    block_table: Int[Array, "slots blocks_per_seq"]
    length: Int[Array, " slots"]  # tokens whose keys and values the pool holds
    last_token: Int[Array, " slots"]


class SamplingTable(NamedTuple):
    """How each slot samples: written when a sequence is admitted, read by the samplers."""

    seed: UInt32[Array, "slots 2"]
    sample_index: Int[Array, " slots"]
    temperature: Float[Array, " slots"]  # 0 is greedy
    top_k: Int[Array, " slots"]  # 0 is all
    top_p: Float[Array, " slots"]
    min_p: Float[Array, " slots"]
    min_len: Int[Array, " slots"]  # full sampler: tokens before which `stop_ids` are masked
    stop_ids: Int[Array, "slots stop_ids"]  # full sampler: padded with -1


class DeviceState(NamedTuple):
    """One pytree. (No dataclass: its fields also hold shapes and shardings while executables are lowered.)"""

    kv_pools: list[Float[Array, "blocks 2 kv_heads block_size head_dim"]]  # one a layer
    slots: Slots
    sampling: SamplingTable


def empty_slots(max_num_seqs: int, blocks_per_seq: int) -> tuple[Slots, SamplingTable]:
    ints = jnp.zeros(max_num_seqs, jnp.int32)
    floats = jnp.zeros(max_num_seqs, jnp.float32)
    slots = Slots(jnp.zeros((max_num_seqs, blocks_per_seq), jnp.int32), ints, ints)
    return slots, SamplingTable(
        seed=jnp.zeros((max_num_seqs, 2), jnp.uint32), sample_index=ints, temperature=floats, top_k=ints,
        top_p=floats, min_p=floats, min_len=ints, stop_ids=jnp.full((max_num_seqs, NUM_STOP_IDS), -1, jnp.int32),
    )  # fmt: skip


def install_rows(slots: Slots, sampling: SamplingTable, rows: SlotRow) -> tuple[Slots, SamplingTable]:
    """Writes whole slot rows; padding rows lie past the table and are dropped."""

    def put(table: Array, values: Array) -> Array:
        return table.at[rows.slot].set(values, mode="drop")

    floats = jax.lax.bitcast_convert_type(rows.floats, jnp.float32)
    slots = Slots(
        put(slots.block_table, rows.block_table), put(slots.length, rows.length), put(slots.last_token, rows.last_token)
    )
    return slots, SamplingTable(
        seed=put(sampling.seed, jax.lax.bitcast_convert_type(rows.seed, jnp.uint32)),
        sample_index=put(sampling.sample_index, rows.sample_index),
        temperature=put(sampling.temperature, floats[:, 0]),
        top_k=put(sampling.top_k, rows.top_k),
        top_p=put(sampling.top_p, floats[:, 1]),
        min_p=put(sampling.min_p, floats[:, 2]),
        min_len=put(sampling.min_len, rows.min_len),
        stop_ids=put(sampling.stop_ids, rows.stop_ids),
    )
