"""From logits to tokens. What changes logits is in `logit_rules`, filters and draws in `pallas_kernels.sampling`."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxllm.engine.beam.candidates import CANDIDATES_WIDTH
from jaxllm.engine.device.candidates import candidate_rows
from jaxllm.engine.device.columns import of_slots
from jaxllm.engine.device.logit_rules import forbid
from jaxllm.engine.device.logprobs import logprob_rows
from jaxllm.engine.device.state import LogitRules, SamplingTable
from jaxllm.engine.logprobs import WIDTH_WITH_IDS
from jaxllm.engine.schedule.plan import NO_TOKEN, NOT_FINITE
from jaxllm.pallas_kernels import sampling
from jaxllm.pallas_kernels.dispatch import UNPLACED, Placement
from jaxllm.pallas_kernels.sampling.reference import threshold
from jaxllm.sampling_checks import LOGPROBS_MODES
from jaxllm.sharding.rules import mesh_axes, shard_map

MIN_TEMPERATURE = 1e-5  # below it a row is greedy


def sample(
    logits: Float[Array, "samples vocab"],
    slots: Int[Array, " samples"],
    lengths: Int[Array, " slots"],
    table: SamplingTable,
    *,
    placement: Placement = UNPLACED,
) -> Int[Array, " samples"]:
    """A token for each row, whose parameters are those of its slot (padding rows give garbage).

    `lengths` counts each slot's tokens before the new one, whose position it thereby is. A row whose logits are
    not finite gives `NOT_FINITE`. `placement` says where the logits are.
    """
    row, length = _of_samples(table, lengths, slots)
    tokens, top = _draw(logits, row, length, placement)
    return jnp.where(jnp.isfinite(top), tokens, NOT_FINITE)


def sample_full(
    logits: Float[Array, "samples vocab"],
    slots: Int[Array, " samples"],
    lengths: Int[Array, " slots"],
    table: SamplingTable,
    rules: LogitRules,
    *,
    altered: Float[Array, "samples vocab"] | None = None,
    is_altered: Int[Array, ""] | int = 1,
    vocab: int | None = None,
    num_rows: Int[Array, ""] | None = None,
    placement: Placement = UNPLACED,
) -> tuple[Int[Array, " samples"], Int[Array, "samples width"], Int[Array, "samples candidates_width"]]:
    """Like `sample`, with everything that a request may ask for: tokens, the rows of `logprob_rows` (zeros if nobody
    wants any), and those of `candidate_rows` (zeros without beams). A row that may have no token at all gives
    `NO_TOKEN`.

    The tokens are drawn from `altered`, what `logit_rules.alter` made of the logits. If nobody asked for that it is
    None, or the logits once more with `is_altered` 0. `vocab` counts the tokens, if the logits are padded. Rows from
    `num_rows` on, if that is given, are padding, which gives anything.
    """
    row, length = _of_samples(table, lengths, slots)
    is_beam, logprob_ids = row.is_beam > 0, of_slots(rules.logprob_ids, slots)
    some = {"num_rows": num_rows, "placement": placement}
    largest, normalizer = sampling.normalize(logits, **some)
    if altered is None:
        altered, is_altered = logits, 0
    altered = altered - jnp.where(is_beam & (is_altered == 0), normalizer, 0.0)[:, None]
    altered = _mask_stop_ids(altered, row.stop_ids, length < row.min_len)
    tokens, top = _draw(altered, row, length, placement)
    tokens = jnp.where(top > -jnp.inf, tokens, NO_TOKEN)
    tokens = jnp.where(jnp.isfinite(largest), tokens, NOT_FINITE)
    of_rows = partial(logprob_rows, tokens=tokens, logprob_ids=logprob_ids, vocab=vocab, **some)

    def of_wanted(x: Array, own: Array) -> Array:
        return of_rows(x, normalizer=own)

    wants, is_raw = row.wants_logprobs > 0, row.logprobs_mode == LOGPROBS_MODES.index("raw")
    rows = jax.lax.switch(
        jnp.any(wants).astype(jnp.int32) + jnp.any(wants & ~is_raw).astype(jnp.int32),
        (
            lambda x, _: jnp.zeros((x.shape[0], WIDTH_WITH_IDS), jnp.int32),
            lambda x, _: of_rows(x, normalizer=normalizer),
            lambda x, drawn_from: of_wanted(*_as_wanted(x, normalizer, drawn_from, row, **some)),
        ),
        *(logits, altered),
    )
    candidates = jax.lax.cond(
        jnp.any(is_beam),
        lambda x: candidate_rows(x, logits, normalizer=normalizer, **some),
        lambda x: jnp.zeros((x.shape[0], CANDIDATES_WIDTH), jnp.int32),
        altered,
    )
    return tokens, rows, candidates


def _of_samples(
    table: SamplingTable, lengths: Int[Array, " slots"], slots: Int[Array, " samples"]
) -> tuple[SamplingTable, Int[Array, " samples"]]:
    """The rows of both for each sample. Padding is greedy and wants nothing, which takes the least time."""
    return jax.tree.map(lambda column: column.at[slots].get(mode="fill", fill_value=0), (table, lengths))


def _as_wanted(
    logits: Float[Array, "samples vocab"],
    normalizer: Float[Array, " samples"],
    altered: Float[Array, "samples vocab"],
    row: SamplingTable,
    num_rows: Int[Array, ""] | None,
    placement: Placement,
) -> tuple[Float[Array, "samples vocab"], Float[Array, " samples"]]:
    """The logits whose softmax each row's log-probabilities are of, and its normaliser; see
    `SamplingParams.logprobs_mode`."""
    is_raw = row.logprobs_mode == LOGPROBS_MODES.index("raw")
    is_random = row.temperature >= MIN_TEMPERATURE
    filters = (row.top_k > 0) | (row.top_p < 1) | (row.min_p > 0)
    filters = filters & is_random & (row.logprobs_mode == LOGPROBS_MODES.index("sampled"))

    def scaled(x: Array) -> Array:
        top = jnp.max(x, axis=-1)
        x = x - jnp.where(jnp.isfinite(top), top, 0.0)[:, None]  # so that dividing can't overflow
        return x / jnp.where(is_random, row.temperature, 1.0)[:, None]

    def least_kept(x: Array) -> Array:
        options = {"total": sampling.total_of(placement), "has_loops": placement.platform != "gpu"}
        least = threshold(scaled(x), row.top_k, row.top_p, row.min_p, **options)
        return jnp.where(filters, least, -jnp.inf)

    # Only a number of each row leaves the branch: another array as wide as the logits would take memory.
    least = jax.lax.cond(jnp.any(filters), least_kept, lambda x: jnp.full(x.shape[0], -jnp.inf), altered)
    x = scaled(altered)
    x = jnp.where(x < least[:, None], -jnp.inf, x)
    own = sampling.normalize(x, num_rows=num_rows, placement=placement).normalizer
    return jnp.where(is_raw[:, None], logits, x), jnp.where(is_raw, normalizer, own)


def _draw(
    logits: Float[Array, "samples vocab"], row: SamplingTable, length: Int[Array, " samples"], placement: Placement
) -> sampling.Draws:
    temperature = jnp.where(row.temperature >= MIN_TEMPERATURE, row.temperature, 0.0)
    keys = jax.random.key_data(jax.vmap(sample_key)(row.seed, row.sample_index, length))
    options = {"placement": placement, "on_each": partial(_with_all_logits, placement.mesh)}
    return sampling.draw(logits, temperature, row.top_k, row.top_p, row.min_p, keys, **options)


def _with_all_logits(mesh: Mesh | None, fn: Callable) -> Callable:
    """`fn` run on each device, whose first argument are logits: those are gathered here, as XLA would gather the larger
    weight that they come from."""
    if mesh is None or mesh.size == 1:
        return fn
    axes = mesh_axes("vocab", (None, "vocab"), mesh)

    def run(part: Array, *others: Array) -> tuple[Array, ...]:
        return tuple(fn(jax.lax.all_gather(part, axes, axis=1, tiled=True), *others))

    return shard_map(run, mesh, ((None, "vocab"), *[()] * 5), ((), ()))


def _mask_stop_ids(
    logits: Float[Array, "samples vocab"], stop_ids: Int[Array, "samples stop_ids"], active: Bool[Array, " samples"]
) -> Float[Array, "samples vocab"]:
    return forbid(logits, jnp.where(active[:, None], stop_ids, -1))


def sample_key(seed: UInt32[Array, "2"], sample_index: Int[Array, ""], position: Int[Array, ""]) -> Array:
    """The draw's key: it depends on the request and the position alone, never on neighbours."""
    key = jax.random.wrap_key_data(seed, impl="threefry2x32")
    return jax.random.fold_in(jax.random.fold_in(key, sample_index), position)
