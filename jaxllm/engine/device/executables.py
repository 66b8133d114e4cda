"""The functions that run on the device. Each takes the state it writes donated."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxllm.engine.device.cache_layout import CacheLayout
from jaxllm.engine.device.columns import RowLayout, install, of_slots
from jaxllm.engine.device.layer_caches import LayerCaches, pools_of, view_table
from jaxllm.engine.device.logit_rules import alter
from jaxllm.engine.device.logprobs import logprob_rows
from jaxllm.engine.device.model_shape import ModelShape
from jaxllm.engine.device.packing import FROM_SLOT, PoolLayout, SampleLayout, StepLayout
from jaxllm.engine.device.sampler import sample, sample_full
from jaxllm.engine.device.slot_rows import AdmitLayout, TableShape
from jaxllm.engine.device.state import SAMPLING_LAYOUT, LogitRules, Slots
from jaxllm.engine.schedule.plan import SharedPart
from jaxllm.models.cache import SharedTokens
from jaxllm.models.context import LastTokens, StepContext
from jaxllm.pallas_kernels.dispatch import UNPLACED, Placement
from jaxllm.pallas_kernels.paged_attention import PagedBatch, first_key_multiple
from jaxllm.sharding.rules import gathered


def step(
    leaves: Sequence[Array],
    kv_pools: list[Array],
    history: Int[Array, "pages block_size"],
    slots: Slots,
    last_hidden: Float[Array, "max_tokens embed"],
    packed: Int[Array, " size"],
    *,
    model_shape: ModelShape,
    layout: StepLayout,
    tables: Sequence[TableShape],
    caches: CacheLayout,
    placement: Placement,
    skips_unread: bool = False,
) -> tuple[list[Array], Array, Slots, Array, Int[Array, "4"]]:
    """One forward pass over a ragged batch. Returns pools, history, slots and hidden states, and the batch's counts,
    which nobody needs but to know that the step is over. After the parameters `leaves` has the scales of pools of 8-bit
    numbers. With `skips_unread` hidden states that nobody reads may be anything."""
    leaves, kv_scales = leaves[: len(model_shape.leaves)], leaves[len(model_shape.leaves) :]
    given = layout.unpack(packed)
    slots = slots._replace(block_tables=_with_new_blocks(slots.block_tables, given.new_blocks))
    rows = of_slots(slots, given.slots)
    if layout.sharers > 1:
        rows = rows._replace(length=jnp.where(given.slots == given.shared[0], given.shared[1], rows.length))
    cu_q_lens = jnp.pad(jnp.cumsum(given.q_lens), (1, 0))
    first_table = rows.block_tables[0][:, 0]
    batch = PagedBatch(first_table, cu_q_lens, rows.length + given.q_lens, given.counts[:2])
    row, positions, _ = batch.token_positions(layout.tokens)
    tokens = jnp.where(given.tokens == FROM_SLOT, rows.last_token[row], given.tokens)
    is_token = jnp.arange(layout.tokens, dtype=jnp.int32) < given.counts[2]
    page = jnp.where(is_token, first_table[row, positions // layout.block_size], len(history))
    history = history.at[page, positions % layout.block_size].set(tokens, mode="drop")
    shared = None
    if layout.sharers > 1:
        at = jnp.where(is_token & (given.slots[row] == given.shared[0]), positions, -1)
        table = slots.block_tables[0].at[given.shared[0], 0].get(mode="clip")
        shared = _shared_tokens(SharedPart(*given.shared), at, table, len(slots.length), len(history), layout)
        history = history.at[shared.blocks].set(gathered(tokens)[shared.tokens], mode="drop", unique_indices=True)

    model = model_shape.model(leaves)
    read = LastTokens(given.counts[3] != 0, cu_q_lens[1:] - 1, given.counts[1]) if skips_unread else None
    ctx = StepContext(positions, row, None, is_token, given.counts[2], read, placement)
    sizes = rows.length, layout.block_size, first_key_multiple(placement)
    views = [view_table(batch, *each, *sizes) for each in zip(rows.block_tables, tables, strict=True)]
    sizes = caches, placement, layout.block_size
    hidden, written = model(tokens, ctx, LayerCaches(kv_pools, views, model_shape.caches, *sizes, kv_scales, shared))
    lengths = slots.length.at[given.slots].add(given.q_lens, mode="drop")
    if shared is not None:
        lengths = lengths.at[given.shared[0]].set(given.shared[3], mode="drop")
    slots = slots._replace(length=lengths)
    hidden = jnp.where(is_token[:, None], hidden, jnp.zeros((), hidden.dtype))  # kernels leave padding as it was
    last_hidden = jax.lax.dynamic_update_slice_in_dim(last_hidden, hidden, 0, 0)
    return pools_of(written, caches), history, slots, last_hidden, given.counts


def _shared_tokens(
    part: SharedPart, at: Int[Array, " tokens"], table: Int[Array, " width"], slots: int, pages: int, layout: StepLayout
) -> SharedTokens:
    """Of a prompt that all shards compute; `at` are the positions in it of this shard's tokens, -1 of others', and
    `table` its blocks here."""
    size, at = layout.block_size, gathered(at)
    index = jnp.arange(len(at), dtype=jnp.int32)
    source = jnp.zeros(len(at), jnp.int32).at[jnp.where(at < 0, len(at), at - part.begin)].set(index, mode="drop")
    number = index[: len(at) // size]
    is_real = (part.slot < slots) & ((number + 1) * size <= part.end - part.begin)
    blocks = jnp.where(is_real, table.at[part.begin // size + number].get(mode="clip"), pages + number)
    return SharedTokens(blocks, source[: len(number) * size].reshape(-1, size))


def _with_new_blocks(tables: Sequence[Array], new_blocks: Int[Array, "columns n"]) -> tuple[Array, ...]:
    """The slots' block tables with the blocks that a step appends or replaces."""
    slot, index, *pages = new_blocks
    written = []
    for table in tables:
        num_pages, width = table.shape[1:]
        of_group, pages = jnp.stack(pages[:num_pages], axis=1), pages[num_pages:]
        written.append(table.at[slot, :, index % width].set(of_group, mode="drop"))
    return tuple(written)


def logits_step(
    head: Sequence[Array],
    hidden: Float[Array, "max_tokens embed"],
    packed: Int[Array, " size"],
    *,
    model_shape: ModelShape,
    layout: SampleLayout,
    placement: Placement = UNPLACED,
) -> Float[Array, "samples vocab"]:
    """The logits that each sample comes from, of the step that has just left its hidden states; anything for rows that
    pad."""
    given = layout.unpack(packed)
    return model_shape.logits(head, hidden, given.tokens, placement, _count(layout.is_sample(given)))


def alter_step(
    logits: Float[Array, "samples vocab"],
    masks: Int[Array, "samples words"],
    packed: Int[Array, " size"],
    slots: Slots,
    sampling: Int[Array, "slots _words"],
    rules: LogitRules,
    history: Int[Array, "pages block_size"],
    *,
    layout: SampleLayout,
    placement: Placement = UNPLACED,
) -> Float[Array, "samples vocab"]:
    """See `alter`."""
    given, table = layout.unpack(packed), SAMPLING_LAYOUT.unpack(sampling)
    return alter(logits, masks, given.slots, slots, table, rules, history, placement=placement)


def sample_step(
    head: Sequence[Array],
    hidden: Float[Array, "max_tokens embed"],
    last_token: Int[Array, " slots"],
    lengths: Int[Array, " slots"],
    sampling: Int[Array, "slots _words"],
    packed: Int[Array, " size"],
    *,
    model_shape: ModelShape,
    layout: SampleLayout,
    placement: Placement = UNPLACED,
) -> tuple[Int[Array, " slots"], Int[Array, " samples"]]:
    """Samples every row, and writes the tokens of rows that are no padding into the slot table."""
    given = layout.unpack(packed)
    logits = logits_step(head, hidden, packed, model_shape=model_shape, layout=layout, placement=placement)
    tokens = sample(logits, given.slots, lengths, SAMPLING_LAYOUT.unpack(sampling), placement=placement)
    (tokens,) = _padded_with_zeros(layout.is_sample(given), tokens)
    return last_token.at[given.slots].set(tokens, mode="drop"), tokens


def _count(is_sample: Bool[Array, " samples"]) -> Int[Array, ""]:
    return jnp.sum(is_sample, dtype=jnp.int32)


def _padded_with_zeros(is_sample: Bool[Array, " samples"], *results: Int[Array, "samples ..."]) -> list[Array]:
    """`results` with zeros for rows that pad: those are the same wherever the step is computed, as replays check."""
    return [jnp.where(jnp.expand_dims(is_sample, range(1, x.ndim)), x, 0) for x in results]


def sample_full_step(
    last_token: Int[Array, " slots"],
    lengths: Int[Array, " slots"],
    sampling: Int[Array, "slots _words"],
    rules: LogitRules,
    logits: Float[Array, "samples vocab"],
    altered: Float[Array, "samples vocab"],
    packed: Int[Array, " size"],
    *,
    vocab: int | None = None,
    layout: SampleLayout,
    placement: Placement = UNPLACED,
) -> tuple[Int[Array, " slots"], Int[Array, "samples width"], Int[Array, "samples candidates_width"]]:
    """Likewise, from logits that are there, of `vocab` tokens if they are padded; `altered` are they after
    `alter_step`, or the same once more. Each row of the result is a token, then its log-probabilities. Beams'
    candidates are apart, as they are read only if there are beams."""
    given = layout.unpack(packed)
    tokens, rows, candidates = sample_full(
        logits,
        given.slots,
        lengths,
        SAMPLING_LAYOUT.unpack(sampling),
        rules,
        altered=altered,
        is_altered=given.is_altered[0],
        vocab=vocab,
        num_rows=_count(layout.is_sample(given)),
        placement=placement,
    )
    tokens, rows, candidates = _padded_with_zeros(layout.is_sample(given), tokens, rows, candidates)
    last_token = last_token.at[given.slots].set(tokens, mode="drop")
    return last_token, jnp.concatenate([tokens[:, None], rows], 1), candidates


def pool_step(
    head: Sequence[Array],
    sums: Float[Array, "slots embed"],
    hidden: Float[Array, "max_tokens embed"],
    packed: Int[Array, " size"],
    *,
    model_shape: ModelShape,
    layout: PoolLayout,
    placement: Placement = UNPLACED,
) -> tuple[Float[Array, "slots embed"], Float[Array, "rows outputs"]]:
    """Adds the hidden states of the step just over to the sums of its rows, in float32. Returns the sums of all slots,
    and of each row what its sum gives so far."""
    given = layout.unpack(packed)
    hidden = hidden[: layout.tokens]
    token = jnp.arange(layout.tokens, dtype=jnp.int32)[None, :]
    is_summed = (token >= given.starts[:, None]) & (token < given.stops[:, None])
    is_finite = jnp.isfinite(hidden)  # one that is not stays its own row's: it would spread through zeros
    is_sound = ~jnp.any(is_summed & ~jnp.all(is_finite, axis=1)[None, :], axis=1)
    added = jnp.dot(
        is_summed.astype(hidden.dtype),
        jnp.where(is_finite, hidden, jnp.zeros_like(hidden)),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    added = jnp.where(is_sound[:, None], added, jnp.nan)
    before = jnp.where((given.begins == 1)[:, None], 0.0, sums.at[given.slots].get(mode="clip"))
    total = before + added
    share = jax.lax.bitcast_convert_type(given.shares, jnp.float32)
    pooled = total * jnp.broadcast_to(share[:, None], total.shape)
    return sums.at[given.slots].set(total, mode="drop"), model_shape.classify(head, pooled, placement)


def prompt_logprobs(
    head: Sequence[Array],
    hidden: Float[Array, "max_tokens embed"],
    packed: Int[Array, "2 rows"],
    *,
    model_shape: ModelShape,
    placement: Placement = UNPLACED,
) -> Int[Array, "rows width"]:
    """Log-probabilities of prompt tokens: of `packed[1]` after the step's tokens at `packed[0]`, which is -1 for rows
    that pad, the last ones."""
    is_token = packed[0] >= 0
    num_rows = _count(is_token)
    logits = model_shape.logits(head, hidden, packed[0], placement, num_rows)
    rows = logprob_rows(logits, packed[1], vocab=model_shape.vocab, num_rows=num_rows, placement=placement)
    (rows,) = _padded_with_zeros(is_token, rows)
    return rows


def admit(
    slots: Slots, sampling: Int[Array, "slots _words"], packed: Int[Array, "rows size"], *, layout: AdmitLayout
) -> tuple[Slots, Array]:
    """Writes whole rows of the slot table."""
    row = layout.unpack(packed)
    slots = install(slots, Slots(row.block_tables, row.length, row.last_token), row.slot)
    return slots, install(sampling, layout.sampling_rows(packed), row.slot)


def install_rules(rules: LogitRules, packed: Int[Array, "rows size"], *, layout: RowLayout) -> LogitRules:
    """Writes rows of the rules: a slot each, then what `layout` says."""
    return install(rules, layout.unpack(packed[:, 1:]), packed[:, 0])
