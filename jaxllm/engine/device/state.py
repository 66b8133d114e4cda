"""The engine's state on the device: the KV pool and the slot table. Passed in, donated, returned."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxllm.engine.device.packing import BAD_WORD_LEN, NUM_BAD_WORDS, NUM_STOP_IDS, PenaltyRow, SlotRow
from jaxllm.sampling_params import MAX_LOGPROB_TOKEN_IDS


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
    # For the full sampler alone:
    min_len: Int[Array, " slots"]  # tokens before which `stop_ids` are masked
    stop_ids: Int[Array, "slots stop_ids"]  # padded with -1
    alters_logits: Int[Array, " slots"]  # 1 if its row of the penalties counts
    wants_logprobs: Int[Array, " slots"]  # 1 or 0
    is_beam: Int[Array, " slots"]  # 1 or 0
    repetition_penalty: Float[Array, " slots"]
    frequency_penalty: Float[Array, " slots"]
    presence_penalty: Float[Array, " slots"]


class PenaltyState(NamedTuple):
    """What only the full sampler reads of a slot: `install_penalties` writes the rows of sequences that need one."""

    bias: Float[Array, "slots vocab"]  # added to the logits; minus infinity forbids a token
    output_counts: Int[Array, "slots vocab"]  # how often the output has each token
    in_prompt: Bool[Array, "slots vocab"]
    bad_words: Int[Array, "slots bad_words word_len"]  # token ids, padded with -1 in front
    recent: Int[Array, "slots word_len_less_1"]  # last output tokens, padded with -1 in front
    logprob_ids: Int[Array, "slots logprob_ids"]  # tokens whose log-probabilities are wanted


# Logical axes: what is as wide as the vocabulary is split like the logits.
PENALTY_AXES = PenaltyState(*[(None, "vocab")] * 3, (None, None, None), *[(None, None)] * 2)


class DeviceState(NamedTuple):
    """One pytree. (No dataclass: its fields also hold shapes and shardings while executables are lowered.)"""

    kv_pools: list[Float[Array, "blocks 2 kv_heads block_size head_dim"]]  # one a layer
    slots: Slots
    sampling: SamplingTable
    penalties: PenaltyState
    hidden: Float[Array, "tokens embed"]  # of the step before, whose prompt tokens may be scored


def empty_slots(max_num_seqs: int, blocks_per_seq: int) -> tuple[Slots, SamplingTable]:
    ints = jnp.zeros(max_num_seqs, jnp.int32)
    floats = jnp.zeros(max_num_seqs, jnp.float32)
    slots = Slots(jnp.zeros((max_num_seqs, blocks_per_seq), jnp.int32), ints, ints)
    return slots, SamplingTable(
        seed=jnp.zeros((max_num_seqs, 2), jnp.uint32),
        sample_index=ints,
        temperature=floats,
        top_k=ints,
        top_p=floats,
        min_p=floats,
        min_len=ints,
        stop_ids=jnp.full((max_num_seqs, NUM_STOP_IDS), -1, jnp.int32),
        alters_logits=ints,
        wants_logprobs=ints,
        is_beam=ints,
        repetition_penalty=floats,
        frequency_penalty=floats,
        presence_penalty=floats,
    )


def empty_penalties(max_num_seqs: int, vocab: int) -> PenaltyState:
    return PenaltyState(
        bias=jnp.zeros((max_num_seqs, vocab), jnp.float32),
        output_counts=jnp.zeros((max_num_seqs, vocab), jnp.int32),
        in_prompt=jnp.zeros((max_num_seqs, vocab), jnp.bool_),
        bad_words=jnp.full((max_num_seqs, NUM_BAD_WORDS, BAD_WORD_LEN), -1, jnp.int32),
        recent=jnp.full((max_num_seqs, BAD_WORD_LEN - 1), -1, jnp.int32),
        logprob_ids=jnp.zeros((max_num_seqs, MAX_LOGPROB_TOKEN_IDS), jnp.int32),
    )


def install_rows(slots: Slots, sampling: SamplingTable, rows: SlotRow) -> tuple[Slots, SamplingTable]:
    """Writes whole slot rows; padding rows lie past the table and are dropped."""

    def put(table: Array, values: Array | np.ndarray) -> Array:
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
        alters_logits=put(sampling.alters_logits, rows.alters_logits),
        wants_logprobs=put(sampling.wants_logprobs, rows.wants_logprobs),
        is_beam=put(sampling.is_beam, rows.is_beam),
        repetition_penalty=put(sampling.repetition_penalty, floats[:, 3]),
        frequency_penalty=put(sampling.frequency_penalty, floats[:, 4]),
        presence_penalty=put(sampling.presence_penalty, floats[:, 5]),
    )


def install_penalties(penalties: PenaltyState, row: PenaltyRow) -> PenaltyState:
    """Writes a part of one slot's row, the rest of which is emptied by its first part."""
    slot, is_first = row.slot[0], row.is_first[0] > 0
    fill = jax.lax.bitcast_convert_type(row.fill[0], jnp.float32)
    bias = jax.lax.bitcast_convert_type(row.bias, jnp.float32)

    def put(table: Array, empty: Array, values: Array | np.ndarray) -> Array:
        kept = jnp.where(is_first, empty.astype(table.dtype), table[slot])
        return table.at[slot].set(kept.at[row.ids].set(values.astype(table.dtype), mode="drop"))

    zero = jnp.int32(0)
    return PenaltyState(
        bias=put(penalties.bias, fill, bias),
        output_counts=put(penalties.output_counts, zero, row.output_counts),
        in_prompt=put(penalties.in_prompt, zero, row.in_prompt),
        bad_words=penalties.bad_words.at[slot].set(row.bad_words),
        recent=penalties.recent.at[slot].set(row.recent),
        logprob_ids=penalties.logprob_ids.at[slot].set(row.logprob_ids),
    )
