"""From logits to tokens: bias, penalties and masks here, the filters and the draw in `pallas_kernels.sampling`."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxllm.engine.beam.candidates import CANDIDATES_WIDTH
from jaxllm.engine.device.candidates import candidate_rows
from jaxllm.engine.device.logprobs import logprob_rows
from jaxllm.engine.device.state import PenaltyState, SamplingTable
from jaxllm.engine.logprobs import WIDTH_WITH_IDS
from jaxllm.engine.schedule.plan import NO_TOKEN, NOT_FINITE
from jaxllm.pallas_kernels import sampling
from jaxllm.pallas_kernels.dispatch import UNPLACED, Placement

MIN_TEMPERATURE = 1e-5  # below it a row is greedy


def sample(
    logits: Float[Array, "seqs vocab"],
    slots: Int[Array, " seqs"],
    lengths: Int[Array, " slots"],
    table: SamplingTable,
    *,
    placement: Placement = UNPLACED,
) -> Int[Array, " seqs"]:
    """A token for each row, whose parameters are those of its slot (padding rows give garbage).

    `lengths` counts each slot's tokens before the new one, whose position it thereby is. A row whose logits are
    not finite gives `NOT_FINITE`. `placement` says where the logits are.
    """
    row, length = _of_slots(table, slots), lengths.at[slots].get(mode="clip")
    tokens, top = _draw(logits, row, length, placement)
    return jnp.where(jnp.isfinite(top), tokens, NOT_FINITE)


def sample_full(
    logits: Float[Array, "seqs vocab"],
    slots: Int[Array, " seqs"],
    lengths: Int[Array, " slots"],
    table: SamplingTable,
    penalties: PenaltyState,
    *,
    allowed: Float[Array, "seqs vocab"] | None = None,
    placement: Placement = UNPLACED,
) -> tuple[Int[Array, " seqs"], PenaltyState, Int[Array, "seqs width"], Int[Array, "seqs candidates_width"]]:
    """Like `sample`, with everything that a request may ask for: tokens, the penalties after them, the rows of
    `logprob_rows` (zeros if nobody wants any), and those of `candidate_rows` (zeros without beams). A row that may
    have no token at all gives `NO_TOKEN`.

    `allowed` are the logits after the masks of grammars (None: there are none), from which the tokens are drawn.
    Bias and penalties alter the log-probabilities of beams, not their logits; these are not normalised again.
    """
    row, length = _of_slots(table, slots), lengths.at[slots].get(mode="clip")
    is_beam = row.is_beam > 0
    has_beams = jnp.any(is_beam)
    largest, normalizer = sampling.normalize(logits, placement=placement)
    altered = (logits if allowed is None else allowed) - jnp.where(is_beam, normalizer, 0.0)[:, None]
    altered = jax.lax.cond(
        jnp.any(row.alters_logits > 0), lambda x: alter(x, row, _of_slots(penalties, slots)), lambda x: x, altered
    )
    altered = mask_stop_ids(altered, row.stop_ids, length < row.min_len)
    tokens, top = _draw(altered, row, length, placement)
    tokens = jnp.where(top > -jnp.inf, tokens, NO_TOKEN)
    tokens = jnp.where(jnp.isfinite(largest), tokens, NOT_FINITE)
    rows = jax.lax.cond(
        jnp.any(row.wants_logprobs > 0),
        lambda x: logprob_rows(
            x, tokens, penalties.logprob_ids.at[slots].get(mode="clip"), normalizer=normalizer, placement=placement
        ),
        lambda x: jnp.zeros((x.shape[0], WIDTH_WITH_IDS), jnp.int32),
        logits,
    )
    candidates = jax.lax.cond(
        has_beams,
        lambda x: candidate_rows(x, logits, normalizer=normalizer, placement=placement),
        lambda x: jnp.zeros((x.shape[0], CANDIDATES_WIDTH), jnp.int32),
        altered,
    )
    return tokens, _remember(penalties, slots, tokens), rows, candidates


def mask_logits(logits: Float[Array, "seqs vocab"], masks: Int[Array, "seqs words"]) -> Float[Array, "seqs vocab"]:
    """Minus infinity where the token's bit of the row's mask is 0."""
    bits = masks[:, :, None] >> jnp.arange(32, dtype=jnp.int32)[None, None, :] & 1
    bits = bits.reshape(masks.shape[0], -1)[:, : logits.shape[1]]
    return jnp.where(bits > 0, logits, -jnp.inf)


def _of_slots(table, slots: Int[Array, " seqs"]):
    return jax.tree.map(lambda column: column.at[slots].get(mode="clip"), table)


def _draw(
    logits: Float[Array, "seqs vocab"], row: SamplingTable, length: Int[Array, " seqs"], placement: Placement
) -> sampling.Draws:
    temperature = jnp.where(row.temperature >= MIN_TEMPERATURE, row.temperature, 0.0)
    keys = jax.random.key_data(jax.vmap(sample_key)(row.seed, row.sample_index, length))
    return sampling.draw(logits, temperature, row.top_k, row.top_p, row.min_p, keys, placement=placement)


def alter(
    logits: Float[Array, "seqs vocab"], row: SamplingTable, penalties: PenaltyState
) -> Float[Array, "seqs vocab"]:
    """Bias and masks, then the penalties (repetition: arXiv 1909.05858, section 4.1), in rows that ask for them."""
    x = logits + penalties.bias
    in_output = penalties.output_counts > 0
    repetition = row.repetition_penalty[:, None]
    x = jnp.where(penalties.in_prompt | in_output, jnp.where(x > 0, x / repetition, x * repetition), x)
    x = x - row.frequency_penalty[:, None] * penalties.output_counts.astype(jnp.float32)
    x = x - row.presence_penalty[:, None] * in_output.astype(jnp.float32)
    *_, prefix_len = penalties.recent.shape
    prefix, last = penalties.bad_words[..., :prefix_len], penalties.bad_words[..., prefix_len]
    is_next = jnp.all((prefix < 0) | (prefix == penalties.recent[:, None]), axis=-1)
    x = forbid(x, jnp.where(is_next, last, -1))
    return jnp.where(row.alters_logits[:, None] > 0, x, logits)


def forbid(logits: Float[Array, "seqs vocab"], ids: Int[Array, "seqs ids"]) -> Float[Array, "seqs vocab"]:
    """Minus infinity at each row's `ids`, of which negative ones don't count."""
    ids = jnp.where(ids >= 0, ids, logits.shape[1])  # past the vocabulary: -1 would wrap to the last token
    return jax.vmap(lambda row, row_ids: row.at[row_ids].set(-jnp.inf, mode="drop"))(logits, ids)


def mask_stop_ids(
    logits: Float[Array, "seqs vocab"], stop_ids: Int[Array, "seqs stop_ids"], active: Bool[Array, " seqs"]
) -> Float[Array, "seqs vocab"]:
    return forbid(logits, jnp.where(active[:, None], stop_ids, -1))


def _remember(penalties: PenaltyState, slots: Int[Array, " seqs"], tokens: Int[Array, " seqs"]) -> PenaltyState:
    """The penalties with the new tokens in them; nothing where a row has none, or is padding."""
    is_token = tokens >= 0
    slots = jnp.where(is_token, slots, penalties.bias.shape[0])
    recent = penalties.recent.at[slots].get(mode="clip")
    recent = jnp.concatenate([recent[:, 1:], tokens[:, None]], axis=1)
    return penalties._replace(
        output_counts=penalties.output_counts.at[slots, jnp.maximum(tokens, 0)].add(1, mode="drop"),
        recent=penalties.recent.at[slots].set(recent, mode="drop"),
    )


def sample_key(seed: UInt32[Array, "2"], sample_index: Int[Array, ""], position: Int[Array, ""]) -> Array:
    """The draw's key: it depends on the request and the position alone, never on neighbours."""
    key = jax.random.wrap_key_data(seed, impl="threefry2x32")
    return jax.random.fold_in(jax.random.fold_in(key, sample_index), position)
