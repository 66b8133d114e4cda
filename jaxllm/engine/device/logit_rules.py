"""What changes logits before the draw: masks, bias, bad words, and penalties from the token history.

No table over the vocabulary is kept: the history lies in the blocks of the KV pool, a token for each position, and is
counted in the steps and for the rows that have penalties.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxllm.engine.device.columns import of_slots
from jaxllm.engine.device.state import LogitRules, SamplingTable, Slots
from jaxllm.pallas_kernels import sampling
from jaxllm.pallas_kernels.dispatch import UNPLACED, Placement
from jaxllm.pallas_kernels.token_counts.api import count_tokens
from jaxllm.pallas_kernels.token_counts.reference import tokens_at


def alter(
    logits: Float[Array, "samples vocab"],
    masks: Int[Array, "samples words"],
    sample_slots: Int[Array, " samples"],
    slots: Slots,
    table: SamplingTable,
    rules: LogitRules,
    history: Int[Array, "pages block_size"],
    *,
    placement: Placement = UNPLACED,
) -> Float[Array, "samples vocab"]:
    """The logits of rows that ask for it after their masks, bias, penalties and bad words; minus infinity forbids a
    token. A beam's are log-probabilities, which are not normalised again. `masks` are those of grammars.

    `slots.length` counts the tokens of each slot in the pool, of which `history` knows the ids. `placement` says
    where the logits are.
    """
    state, row, rule = of_slots((slots, table, rules), sample_slots)
    is_beam, has_rules = row.is_beam > 0, row.has_rules > 0
    normalizer = jax.lax.cond(
        jnp.any(is_beam),
        lambda x: sampling.normalize(x, placement=placement).normalizer,
        lambda x: jnp.zeros(x.shape[0]),
        logits,
    )
    x = logits - jnp.where(is_beam, normalizer, 0.0)[:, None]
    x = mask_logits(x, masks & jnp.where((has_rules & (rule.has_mask > 0))[:, None], rule.mask, -1))
    x = _add_bias(x, jnp.where(has_rules[:, None], rule.bias_ids, -1), rule.bias)
    x = _penalize(x, row, state, history, placement)
    bad_words = jnp.where(has_rules[:, None, None], rule.bad_words, -1)
    return forbid(x, _next_of_bad_words(bad_words, row, state, history))


def mask_logits(
    logits: Float[Array, "samples vocab"], masks: Int[Array, "samples words"]
) -> Float[Array, "samples vocab"]:
    """Minus infinity where the token's bit of the row's mask is 0, or it has none."""
    bits = masks[:, :, None] >> jnp.arange(32, dtype=jnp.int32)[None, None, :] & 1
    bits = bits.reshape(masks.shape[0], -1)[:, : logits.shape[1]]
    if bits.shape[1] < logits.shape[1]:  # padded logits
        bits = jnp.pad(bits, ((0, 0), (0, logits.shape[1] - bits.shape[1])))
    return jnp.where(bits > 0, logits, -jnp.inf)


def forbid(logits: Float[Array, "samples vocab"], ids: Int[Array, "samples ids"]) -> Float[Array, "samples vocab"]:
    """Minus infinity at each row's `ids`, of which negative ones don't count."""
    return jax.vmap(lambda row, row_ids: row.at[row_ids].set(-jnp.inf, mode="drop"))(
        logits, _drop_negative(logits, ids)
    )


def _drop_negative(logits: Float[Array, "samples vocab"], ids: Int[Array, "samples ids"]) -> Int[Array, "samples ids"]:
    return jnp.where(ids >= 0, ids, logits.shape[1])  # past the vocabulary: -1 would wrap to the last token


def _add_bias(
    logits: Float[Array, "samples vocab"], ids: Int[Array, "samples biases"], bias: Float[Array, "samples biases"]
) -> Float[Array, "samples vocab"]:
    add = jax.vmap(lambda row, row_ids, values: row.at[row_ids].add(values, mode="drop"))
    return add(logits, _drop_negative(logits, ids), bias)


def _penalize(
    logits: Float[Array, "samples vocab"],
    row: SamplingTable,
    state: Slots,
    history: Int[Array, "pages block_size"],
    placement: Placement,
) -> Float[Array, "samples vocab"]:
    """Repetition (arXiv 1909.05858, section 4.1; of prompt and output), frequency and presence (of the output)."""
    penalizes = (row.repetition_penalty != 1) | (row.frequency_penalty != 0) | (row.presence_penalty != 0)
    lengths = jnp.where(penalizes, state.length, 0)
    is_known, output_counts = count_tokens(
        history, _history_table(state), lengths, row.prompt_len, vocab=logits.shape[1], placement=placement
    )
    repetition = row.repetition_penalty[:, None]
    x = jnp.where(is_known, jnp.where(logits > 0, logits / repetition, logits * repetition), logits)
    x = x - row.frequency_penalty[:, None] * output_counts.astype(jnp.float32)
    x = x - row.presence_penalty[:, None] * (output_counts > 0).astype(jnp.float32)
    return jnp.where(penalizes[:, None], x, logits)


def _history_table(slots: Slots) -> Int[Array, "slots width"]:
    """Where the history of slots lies: in the first pages of the first group's blocks."""
    return slots.block_tables[0][:, 0]


def _next_of_bad_words(
    bad_words: Int[Array, "samples bad_words word_len"],
    row: SamplingTable,
    state: Slots,
    history: Int[Array, "pages block_size"],
) -> Int[Array, "samples bad_words"]:
    """The last tokens of the bad words that the outputs end with but for it; -1 of others."""
    prefix_len = bad_words.shape[2] - 1
    positions = state.length[:, None] - prefix_len + jnp.arange(prefix_len, dtype=jnp.int32)[None, :]
    recent = tokens_at(jnp.maximum(positions, 0), _history_table(state), history)
    recent = jnp.where(positions >= row.prompt_len[:, None], recent, -1)
    prefix, last = bad_words[..., :prefix_len], bad_words[..., prefix_len]
    is_next = jnp.all((prefix < 0) | (prefix == recent[:, None]), axis=-1)
    return jnp.where(is_next, last, -1)
