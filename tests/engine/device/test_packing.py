"""What the host packs, the device unpacks; and no shape but those of the ladder exists."""

from array import array
from collections import namedtuple
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.engine.device.columns import RowLayout, column, install, join, of_slots
from jaxllm.engine.device.executables import admit
from jaxllm.engine.device.packing import FROM_SLOT, SampleLayout, StepLayout, pick_bucket, sample_ladder, token_ladder
from jaxllm.engine.device.slot_rows import AdmitLayout
from jaxllm.engine.device.state import NUM_STOP_IDS, SAMPLING_LAYOUT, SamplingTable, empty_slots
from jaxllm.engine.schedule.block_pool import BlockPool
from jaxllm.engine.schedule.block_table import BlockTable
from jaxllm.engine.schedule.plan import Chunk, Plan
from jaxllm.engine.schedule.sequence import Sequence
from jaxllm.engine.schedule.sequence_group import Samples
from jaxllm.sampling_params import SamplingParams

INT32_MAX = 2**31 - 1
MAX_NUM_SEQS, BLOCK_SIZE, BLOCKS_PER_SEQ = 6, 4, 5
TABLES = ((1, BLOCKS_PER_SEQ),)
quick = settings(max_examples=40, deadline=None)


def make_request(slot=0, prompt=(7, 8, 9), output=(), *, seed=0, blocks=(), stop_ids=(), sample_index=0, **params):
    request = Sequence(
        prompt_token_ids=list(prompt),
        params=SamplingParams(max_tokens=None, **params),
        arrival=0,
        seed=seed,
        max_total_len=20,
        stop_ids=frozenset(stop_ids),
        sample_index=sample_index,
        own_token_ids=list(output),
        slot=slot,
    )
    Samples([request])
    request.table = BlockTable(BlockPool(0, 4))
    request.table.groups[0].ids, request.table.num_blocks = list(blocks), len(blocks)
    return request


def make_plan(decodes=(), chunks=(), new_blocks=(), forks=()):
    chunks = [Chunk(request, start, stop, int(stop == request.num_tokens)) for request, start, stop in chunks]
    plan = Plan(
        decodes=list(decodes),
        decode_slots=array("i", [request.slot for request in decodes]),
        chunks=chunks,
        new_blocks=list(new_blocks),
        forks=list(forks),
        num_tokens=len(decodes) + sum(chunk.stop - chunk.start for chunk in chunks),
        num_samples=len(decodes) + sum(chunk.num_samples for chunk in chunks) + len(forks),
    )
    plan.seal()
    return plan


@st.composite
def plan_contents(draw, layout):
    """Slots of decode rows; slot, tokens, start and stop of chunks; new blocks; slots of decode rows' forks."""
    slots = draw(st.permutations(range(layout.max_num_seqs)))[: draw(st.integers(1, layout.seqs))]
    slots, forks = slots[: (num := draw(st.integers(1, len(slots))))], slots[num:]
    num_chunks = draw(st.integers(0, len(slots)))
    left = layout.tokens - len(slots)
    chunks = []
    for slot in slots[:num_chunks]:
        q_len = 1 + draw(st.integers(0, left))
        left -= q_len - 1
        tokens = draw(st.lists(st.integers(0, INT32_MAX), min_size=q_len, max_size=q_len + 3))
        start = draw(st.integers(0, len(tokens) - q_len))
        chunks.append((slot, tokens, start, start + q_len))
    new_block = st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 999))
    forks = [(draw(st.sampled_from(slots[num_chunks:])), slot) for slot in forks if slots[num_chunks:]]
    return slots[num_chunks:], chunks, draw(st.lists(new_block, max_size=layout.max_new_blocks)), forks


@pytest.mark.parametrize("tokens", [1, 4, 16])
def test_step_round_trip(tokens):
    layout = StepLayout(tokens, MAX_NUM_SEQS, BLOCK_SIZE)

    @quick
    @given(contents=plan_contents(layout))
    def check(contents):
        decodes, chunks, new_blocks, forks = contents
        decoding = {slot: make_request(slot) for slot in decodes}
        plan = make_plan(
            decoding.values(),
            [(make_request(slot, tokens[:1], tokens[1:]), start, stop) for slot, tokens, start, stop in chunks],
            new_blocks,
            [(decoding[parent], make_request(slot)) for parent, slot in forks],
        )
        packed = layout.pack(plan)
        assert packed.dtype == np.int32 and packed.shape == (layout.size,)
        f = layout.unpack(packed)
        rows, num_decodes, num_new = len(plan.rows), len(decodes), len(new_blocks)
        assert f.counts.tolist() == [num_decodes, rows, plan.num_tokens, 0]
        pad_rows = layout.seqs - rows
        assert f.slots.tolist() == [r.slot for r in plan.rows] + [MAX_NUM_SEQS] * pad_rows
        lens = [1] * num_decodes + [stop - start for _, _, start, stop in chunks]
        assert f.q_lens.tolist() == lens + [0] * pad_rows
        fed = [token for _, tokens, start, stop in chunks for token in tokens[start:stop]]
        assert f.tokens[: plan.num_tokens].tolist() == [FROM_SLOT] * num_decodes + fed
        assert f.tokens.shape == (tokens,) and f.new_blocks.shape == (3, layout.max_new_blocks)
        assert f.new_blocks.T[:num_new].tolist() == [list(new) for new in new_blocks]
        assert (f.new_blocks[0, num_new:] == MAX_NUM_SEQS).all()

    check()


@pytest.mark.parametrize("tokens", [1, 4, 16])
def test_samples_round_trip(tokens):
    layout = StepLayout(tokens, MAX_NUM_SEQS, BLOCK_SIZE)

    @quick
    @given(contents=plan_contents(layout), is_altered=st.booleans())
    def check(contents, is_altered):
        decodes, chunks, _, forks = contents
        decoding = {slot: make_request(slot) for slot in decodes}
        plan = make_plan(
            decoding.values(),
            [(make_request(slot, tokens[:1], tokens[1:]), start, stop) for slot, tokens, start, stop in chunks],
            forks=[(decoding[parent], make_request(slot)) for parent, slot in forks],
        )
        packed = SampleLayout(layout.seqs, MAX_NUM_SEQS).pack(plan, is_altered=is_altered)
        f = SampleLayout(layout.seqs, MAX_NUM_SEQS).unpack(packed)
        samples, end = list(enumerate(decodes)), len(decodes)
        for slot, tokens, start, stop in chunks:
            end += stop - start
            samples += [(end - 1, slot)] * (stop == len(tokens))
        samples += [(decodes.index(parent), slot) for parent, slot in forks]
        padding = layout.seqs - len(samples)
        assert f.tokens.tolist() == [token for token, _ in samples] + [0] * padding
        assert f.slots.tolist() == [slot for _, slot in samples] + [MAX_NUM_SEQS] * padding
        assert f.is_altered.tolist() == [is_altered] and packed.dtype == np.int32

    check()


def test_step_layout_sizes():
    layout = StepLayout(16, MAX_NUM_SEQS, BLOCK_SIZE)
    assert (layout.seqs, layout.max_new_blocks) == (6, 6 + 4)
    assert StepLayout(4, MAX_NUM_SEQS, BLOCK_SIZE).seqs == 4
    assert layout.size == 4 + 2 * 6 + 16 + 3 * 10


def test_step_unpacks_alike_on_the_device():
    layout = StepLayout(16, MAX_NUM_SEQS, BLOCK_SIZE)
    packed = np.arange(layout.size, dtype=np.int32)
    for host, device in zip(layout.unpack(packed), jax.jit(layout.unpack)(packed), strict=True):
        np.testing.assert_array_equal(host, device)


@pytest.mark.parametrize(
    "plan",
    [
        make_plan(chunks=[(make_request(0, range(9)), 0, 9)]),
        make_plan(decodes=[make_request(slot) for slot in range(5)]),
        make_plan(decodes=[make_request(0)], new_blocks=[(0, i, i) for i in range(7)]),
    ],
    ids=["tokens", "rows", "new_blocks"],
)
def test_step_overflow_raises(plan):
    layout = StepLayout(8, 4, BLOCK_SIZE)
    with pytest.raises(ValueError, match="does not fit the bucket of 8, 4 and 6"):
        layout.pack(plan)


def test_too_many_samples_raise():
    plan = make_plan(
        decodes=[request := make_request(0)], forks=[(request, make_request(slot)) for slot in range(1, 5)]
    )
    with pytest.raises(ValueError, match="5 samples do not fit the bucket of 4"):
        SampleLayout(4, MAX_NUM_SEQS).pack(plan)


def test_drafts_are_refused_where_nothing_verifies_them():
    plan, request = Plan(), make_request()
    plan.add_decode(request)
    plan.add_drafts({request: [5, 6]})
    plan.seal()
    assert StepLayout(4, MAX_NUM_SEQS, BLOCK_SIZE).pack(plan).shape
    with pytest.raises(ValueError, match="2 drafts are to be verified, and no sampler does"):
        SampleLayout(4, MAX_NUM_SEQS).pack(plan)


def test_each_pack_is_a_fresh_array():
    request = make_request()
    plan, step = make_plan(decodes=[request]), StepLayout(8, 4, BLOCK_SIZE)
    rows = AdmitLayout(2, 4, TABLES)
    for layout, argument in ((step, plan), (SampleLayout(4, 4), plan), (rows, [(request, 0)])):
        first = layout.pack(argument)
        copy = first.copy()
        second = layout.pack(argument)
        assert not np.shares_memory(first, second)
        second[:] = 0
        np.testing.assert_array_equal(first, copy)


slot_rows = st.fixed_dictionaries(
    {
        "prompt": st.lists(st.integers(0, INT32_MAX), min_size=1, max_size=4),
        "output": st.lists(st.integers(0, INT32_MAX), max_size=4),
        "seed": st.integers(-(2**63), 2**64 - 1),
        "blocks": st.lists(st.integers(0, 2**30), max_size=BLOCKS_PER_SEQ),
        "stop_ids": st.sets(st.integers(0, INT32_MAX), max_size=NUM_STOP_IDS),
        "sample_index": st.integers(0, 127),
        "top_k": st.integers(-1, INT32_MAX),
        "temperature": st.floats(0, 2, width=32),
        "top_p": st.floats(0, 1, width=32),
        "min_p": st.floats(0, 1, width=32),
        "min_tokens": st.integers(0, 10),
    }
)


@pytest.fixture(scope="module")
def compiled_admit():
    """Compiled once for all that is made up."""
    layout = AdmitLayout(4, MAX_NUM_SEQS, TABLES)
    return layout, jax.jit(partial(admit, layout=layout))


@quick
@given(given_rows=st.lists(st.tuples(slot_rows, st.integers(0, 20)), max_size=4))
def test_admit_round_trip(compiled_admit, given_rows):
    """From requests through the packed array into the slot table, of which other rows stay as they were."""
    rows = [(make_request(MAX_NUM_SEQS - 1 - i, **fields), n) for i, (fields, n) in enumerate(given_rows)]
    layout, compiled = compiled_admit
    packed = layout.pack(rows)
    assert packed.dtype == np.int32 and packed.shape == (4, layout.size)
    assert layout.unpack(packed).slot[len(rows) :].tolist() == [MAX_NUM_SEQS] * (4 - len(rows))
    before = empty_slots(MAX_NUM_SEQS, TABLES), join(SAMPLING_LAYOUT.empty(MAX_NUM_SEQS))
    slots, sampling = jax.tree.map(np.asarray, compiled(*before, packed))
    untouched = np.arange(MAX_NUM_SEQS - len(rows))
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves((slots, sampling)), strict=True):
        assert old.dtype == new.dtype
        np.testing.assert_array_equal(old[untouched], new[untouched])
    sampling = SAMPLING_LAYOUT.unpack(sampling)
    for request, length in rows:
        at, params = request.slot, request.params
        assert slots.length[at] == length
        assert slots.last_token[at] == (request.prompt_token_ids + request.output_token_ids)[-1]
        assert slots.block_tables[0][at, 0].tolist() == request.table.ids + [0] * (BLOCKS_PER_SEQ - len(request.table))
        high, low = sampling.seed[at].tolist()
        assert high << 32 | low == request.seed % 2**64
        assert sampling.sample_index[at] == request.sample_index
        floats = [column[at] for column in (sampling.temperature, sampling.top_p, sampling.min_p)]
        assert floats == [params.temperature, params.top_p, params.min_p]
        assert sampling.top_k[at] == max(params.top_k, 0)
        assert sampling.is_beam[at] == 0
        assert sampling.min_len[at] == len(request.prompt_token_ids) + params.min_tokens
        no_ids = [-1] * (NUM_STOP_IDS - len(request.stop_ids))
        assert sampling.stop_ids[at].tolist() == sorted(request.stop_ids) + no_ids


def test_one_more_column_costs_one_line(monkeypatch):
    """It is packed, sent, installed and read like the others."""
    columns = SamplingTable._field_defaults | {
        "top_a": column(np.float32, lambda sequence: [sequence.params.top_p, 7.5], 3, fill=-1)
    }
    wider = namedtuple("Wider", columns, defaults=columns.values())
    monkeypatch.setattr("jaxllm.engine.device.slot_rows.SAMPLING_LAYOUT", layout := RowLayout(wider))
    assert layout.size == SAMPLING_LAYOUT.size + 3
    rows = AdmitLayout(2, MAX_NUM_SEQS, TABLES)

    @jax.jit
    def installed(table, packed):
        row = rows.unpack(packed)
        return install(table, row.sampling, row.slot), row.block_tables[0][:, 0]

    packed = rows.pack([(make_request(3, top_p=0.25, min_p=0.125, blocks=[4]), 2)])
    table, block_table = installed(layout.empty(MAX_NUM_SEQS), packed)
    assert isinstance(table, wider) and block_table[0].tolist() == [4, 0, 0, 0, 0]
    read = of_slots(table, jnp.array([3, 0]))
    assert read.top_a.tolist() == [[0.25, 7.5, -1], [-1, -1, -1]] and read.min_p.tolist() == [0.125, 0]


def test_min_tokens_beyond_all_lengths_masks_to_the_end():
    request = make_request(min_tokens=INT32_MAX)
    layout = AdmitLayout(1, MAX_NUM_SEQS, TABLES)
    assert layout.unpack(layout.pack([(request, 0)])).sampling.min_len[0] >= request.max_total_len


@pytest.mark.parametrize("too_much", [{"blocks": range(BLOCKS_PER_SEQ + 1)}, {"stop_ids": range(NUM_STOP_IDS + 1)}])
def test_admit_overflow_raises(too_much):
    with pytest.raises(ValueError):
        AdmitLayout(1, MAX_NUM_SEQS, TABLES).pack([(make_request(**too_much), 0)])


def test_admit_of_too_many_rows_raises():
    with pytest.raises((ValueError, IndexError)):
        AdmitLayout(1, MAX_NUM_SEQS, TABLES).pack([(make_request(), 0)] * 2)


def test_token_ladder():
    assert token_ladder(1) == (1,)
    assert token_ladder(5) == (1, 5)
    assert token_ladder(8) == (1, 8)
    assert token_ladder(90) == (1, 8, 16, 32, 64, 90)
    assert token_ladder(600) == (1, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 600)
    assert token_ladder(90, 8) == (8, 16, 32, 64, 90)
    assert token_ladder(8, 8) == (8,) and token_ladder(5, 8) == (5,)
    assert token_ladder(600, free_padding=True) == (1, 8, 32, 128, 512, 600)
    assert token_ladder(16, 8, free_padding=True) == (8, 16) and token_ladder(5, free_padding=True) == (1, 5)


def test_sample_ladder():
    assert sample_ladder(6) == (1, 6) and sample_ladder(6, 8) == (6,)
    assert sample_ladder(200, 8) == (8, 16, 32, 64, 128, 200)


@quick
@given(max_tokens=st.integers(1, 10_000), data=st.data())
def test_pick_bucket_takes_the_smallest_that_holds(max_tokens, data):
    ladder = token_ladder(max_tokens)
    assert ladder[-1] == max_tokens and list(ladder) == sorted(set(ladder))
    n = data.draw(st.integers(1, max_tokens))
    bucket = pick_bucket(ladder, n)
    assert bucket in ladder and n <= bucket and all(smaller < n for smaller in ladder if smaller < bucket)
    assert bucket <= max(8, 2 * n) and (bucket <= 64 or 2 * bucket < 3 * n)
    with pytest.raises(ValueError, match=f"{max_tokens + 1} exceeds the largest bucket {max_tokens}"):
        pick_bucket(ladder, max_tokens + 1)


def test_padding_writes_nothing():
    """Ids of padding lie past the table, where a dropping scatter ignores them; a negative one would wrap."""
    layout = StepLayout(8, 4, BLOCK_SIZE)
    f = layout.unpack(layout.pack(make_plan(decodes=[make_request(2)], new_blocks=[(2, 1, 9)])))
    slot, index, block = f.new_blocks
    table = jnp.zeros((4, BLOCKS_PER_SEQ), jnp.int32).at[slot, index].set(block + 1, mode="drop")
    assert table.sum() == 10 and table[2, 1] == 10
    lengths = jnp.zeros(4, jnp.int32).at[f.slots].add(5, mode="drop")
    assert lengths.tolist() == [0, 0, 5, 0]
