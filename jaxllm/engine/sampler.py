"""From logits to tokens: bias and penalties, temperature, min-p, top-k, top-p, a Gumbel draw. Nothing is sorted."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxllm.engine.candidates import CANDIDATES_WIDTH, candidate_rows
from jaxllm.engine.logprobs import WATCHED_WIDTH, logprob_rows
from jaxllm.engine.plan import NO_TOKEN, NOT_FINITE
from jaxllm.engine.state import SamplingExtras, SamplingTable

MIN_TEMPERATURE = 1e-5  # below it a row is greedy


def sample(
    logits: Float[Array, "seqs vocab"],
    slots: Int[Array, " seqs"],
    lengths: Int[Array, " slots"],
    table: SamplingTable,
) -> Int[Array, " seqs"]:
    """A token for each row, whose parameters are those of its slot (padding rows give garbage).

    `lengths` counts each slot's tokens before the new one, whose position it thereby is. A row whose logits are
    not finite gives `NOT_FINITE`.
    """
    row, length = _of_slots(table, slots), lengths.at[slots].get(mode="clip")
    return jnp.where(_is_finite(logits), _choose(logits, row, length), NOT_FINITE)


def sample_full(
    logits: Float[Array, "seqs vocab"],
    slots: Int[Array, " seqs"],
    lengths: Int[Array, " slots"],
    table: SamplingTable,
    extras: SamplingExtras,
) -> tuple[Int[Array, " seqs"], SamplingExtras, Int[Array, "seqs width"], Int[Array, "seqs candidates_width"]]:
    """Like `sample`, with everything that a request may ask for: tokens, the extras after them, the rows of
    `logprob_rows` (zeros if nobody wants any), and those of `candidate_rows` (zeros without beams). A row that may
    have no token at all gives `NO_TOKEN`.

    What alters the logits of others alters the log-probabilities of beams, which are not normalised again.
    """
    row, length = _of_slots(table, slots), lengths.at[slots].get(mode="clip")
    is_beam = row.is_beam > 0
    has_beams = jnp.any(is_beam)
    altered = jax.lax.cond(
        has_beams,
        lambda x: x - jnp.where(is_beam, jax.nn.logsumexp(x, axis=-1), 0.0)[:, None],
        lambda x: x,
        logits,
    )
    altered = jax.lax.cond(
        jnp.any(row.alters_logits > 0), lambda x: alter(x, row, _of_slots(extras, slots)), lambda x: x, altered
    )
    altered = mask_stop_ids(altered, row.stop_ids, length < row.min_len)
    tokens = jnp.where(jnp.max(altered, axis=-1) > -jnp.inf, _choose(altered, row, length), NO_TOKEN)
    tokens = jnp.where(_is_finite(logits), tokens, NOT_FINITE)
    rows = jax.lax.cond(
        jnp.any(row.wants_logprobs > 0),
        lambda x: logprob_rows(x, tokens, extras.watched.at[slots].get(mode="clip")),
        lambda x: jnp.zeros((x.shape[0], WATCHED_WIDTH), jnp.int32),
        logits,
    )
    candidates = jax.lax.cond(
        has_beams,
        lambda x: candidate_rows(x, logits),
        lambda x: jnp.zeros((x.shape[0], CANDIDATES_WIDTH), jnp.int32),
        altered,
    )
    return tokens, _remember(extras, slots, tokens), rows, candidates


def _of_slots(table, slots: Int[Array, " seqs"]):
    return jax.tree.map(lambda column: column.at[slots].get(mode="clip"), table)


def _is_finite(logits: Float[Array, "seqs vocab"]) -> Bool[Array, " seqs"]:
    return jnp.isfinite(jnp.max(logits, axis=-1))


def _choose(logits: Float[Array, "seqs vocab"], row: SamplingTable, length: Int[Array, " seqs"]) -> Int[Array, " seqs"]:
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    is_random = row.temperature >= MIN_TEMPERATURE

    def draw(logits: Array) -> Array:
        scaled = logits - jnp.max(logits, axis=-1, keepdims=True)  # so that dividing can't overflow
        scaled = scaled / jnp.where(is_random, row.temperature, 1.0)[:, None]
        filters = (row.top_k > 0) | (row.top_p < 1) | (row.min_p > 0)
        kept = jax.lax.cond(
            jnp.any(filters & is_random),
            lambda x: jnp.where(x >= threshold(x, row.top_k, row.top_p, row.min_p)[:, None], x, -jnp.inf),
            lambda x: x,
            scaled,
        )
        keys = jax.vmap(sample_key)(row.seed, row.sample_index, length)
        noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:], jnp.float32))(keys)
        drawn = jnp.argmax(kept + noise, axis=-1).astype(jnp.int32)  # Gumbel-max: a draw from softmax(kept)
        return jnp.where(is_random, drawn, greedy)

    return jax.lax.cond(jnp.any(is_random), draw, lambda _: greedy, logits)


def alter(logits: Float[Array, "seqs vocab"], row: SamplingTable, extras: SamplingExtras) -> Float[Array, "seqs vocab"]:
    """Bias and masks, then the penalties (repetition: arXiv 1909.05858, section 4.1), in rows that ask for them."""
    x = logits + extras.bias
    in_output = extras.output_counts > 0
    repetition = row.repetition_penalty[:, None]
    x = jnp.where(extras.in_prompt | in_output, jnp.where(x > 0, x / repetition, x * repetition), x)
    x = x - row.frequency_penalty[:, None] * extras.output_counts.astype(jnp.float32)
    x = x - row.presence_penalty[:, None] * in_output.astype(jnp.float32)
    *_, prefix_len = extras.recent.shape
    prefix, last = extras.bad_words[..., :prefix_len], extras.bad_words[..., prefix_len]
    is_next = jnp.all((prefix < 0) | (prefix == extras.recent[:, None]), axis=-1)
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


def _remember(extras: SamplingExtras, slots: Int[Array, " seqs"], tokens: Int[Array, " seqs"]) -> SamplingExtras:
    """The extras with the new tokens in them; nothing where a row has none, or is padding."""
    is_token = tokens >= 0
    slots = jnp.where(is_token, slots, extras.bias.shape[0])
    recent = extras.recent.at[slots].get(mode="clip")
    recent = jnp.concatenate([recent[:, 1:], tokens[:, None]], axis=1)
    return extras._replace(
        output_counts=extras.output_counts.at[slots, jnp.maximum(tokens, 0)].add(1, mode="drop"),
        recent=extras.recent.at[slots].set(recent, mode="drop"),
    )


def sample_key(seed: UInt32[Array, "2"], sample_index: Int[Array, ""], position: Int[Array, ""]) -> Array:
    """The draw's key: it depends on the request and the position alone, never on neighbours."""
    key = jax.random.wrap_key_data(seed, impl="threefry2x32")
    return jax.random.fold_in(jax.random.fold_in(key, sample_index), position)


def threshold(
    logits: Float[Array, "seqs vocab"],
    top_k: Int[Array, " seqs"],
    top_p: Float[Array, " seqs"],
    min_p: Float[Array, " seqs"],
) -> Float[Array, " seqs"]:
    """The smallest logit that min-p, top-k and top-p, one after the other, keep in each row."""
    top = jnp.max(logits, axis=-1)
    at_least = jnp.where(min_p > 0, top + jnp.log(jnp.maximum(min_p, 1e-38)), -jnp.inf)
    weights = jnp.exp(logits - top[:, None])

    def kept(limit: Array) -> Array:
        return logits >= jnp.maximum(limit, at_least)[:, None]

    # Top-k: the highest limit that keeps k tokens (or all that min-p left, if they are fewer).
    k = jnp.where(top_k > 0, top_k, logits.shape[1])
    k = jnp.minimum(k, jnp.sum(kept(at_least), axis=-1, dtype=jnp.int32))
    at_least = jnp.maximum(at_least, highest_limit(lambda x: jnp.sum(kept(x), axis=-1, dtype=jnp.int32) >= k, top))

    # Top-p: the highest limit that keeps a share p of what is left.
    share = jnp.where(top_p < 1, top_p, 0.0) * jnp.sum(jnp.where(kept(at_least), weights, 0.0), axis=-1)
    by_p = highest_limit(lambda x: jnp.sum(jnp.where(kept(x), weights, 0.0), axis=-1) >= share, top)
    return jnp.maximum(at_least, jnp.where(top_p < 1, by_p, -jnp.inf))


def highest_limit(enough, top: Float[Array, " seqs"]) -> Float[Array, " seqs"]:
    """The highest float32 `x <= top` in each row with `enough(x)`, which holds at -inf and is monotone.

    Bisection over the bits of a float32, mapped to integers of the same order: 32 passes find it exactly.
    """

    def to_float(ordered: Array) -> Array:
        bits = jnp.where(ordered < 0, ordered ^ jnp.int32(0x7FFFFFFF), ordered)
        return jax.lax.bitcast_convert_type(bits, jnp.float32)

    bits = jax.lax.bitcast_convert_type(top, jnp.int32)
    high = jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)
    low = jnp.full_like(high, -0x7F800001)  # -inf

    def halve(_, bounds):  # enough(low) holds throughout; the answer is in [low, high]
        low, high = bounds
        middle = (low >> 1) + (high >> 1) + ((low | high) & 1)  # the mean rounded up, without overflow
        ok = enough(to_float(middle))
        return jnp.where(ok, middle, low), jnp.where(ok, high, middle - 1)

    low, _ = jax.lax.fori_loop(0, 32, halve, (low, high))
    return to_float(low)
