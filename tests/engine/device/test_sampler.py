"""The samplers against numpy in float64, exact probabilities, and their own answers beside other neighbours."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.engine.device.columns import join
from jaxllm.engine.device.executables import sample_full_step
from jaxllm.engine.device.packing import SampleLayout
from jaxllm.engine.device.sampler import sample, sample_full
from jaxllm.engine.device.state import NUM_STOP_IDS, SamplingTable, rules_layout
from jaxllm.engine.schedule.plan import NOT_FINITE
from jaxllm.pallas_kernels.sampling.reference import threshold

SEQS, SLOTS, VOCAB = 4, 6, 16
GREEDY = {
    "seed": 0,
    "sample_index": 0,
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "min_len": 0,
    "stop_ids": (),
    "prompt_len": 0,
    "has_rules": 0,
    "wants_logprobs": 0,
    "logprobs_mode": 0,
    "is_beam": 0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
}


@jax.jit
def full_tokens(logits, slots, lengths, table):
    return sample_full(logits, slots, lengths, table, rules_layout(VOCAB).empty(SLOTS))[0]


SAMPLERS = {"plain": jax.jit(sample), "full": full_tokens}
both = pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS.keys())
INTS = ("sample_index", "top_k", "prompt_len", "min_len", "has_rules", "wants_logprobs", "logprobs_mode", "is_beam")
FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
NORMAL = np.random.default_rng(0).normal(size=(SEQS, VOCAB)).astype(np.float32)


def make_table(rows):
    """A slot table; what a row does not say is greedy."""
    rows = [GREEDY | row for row in rows]

    def column(name, dtype):
        return jnp.asarray([row[name] for row in rows], dtype)

    stop_ids = [[*row["stop_ids"], *[-1] * (NUM_STOP_IDS - len(row["stop_ids"]))] for row in rows]
    return SamplingTable(
        seed=jnp.asarray([divmod(row["seed"], 2**32) for row in rows], jnp.uint32),
        stop_ids=jnp.asarray(stop_ids, jnp.int32),
        **{name: column(name, jnp.int32) for name in INTS},
        **{name: column(name, jnp.float32) for name in FLOATS},
    )


def draw(sampler, logits, table_rows, *, slots=None, lengths=None):
    """The token of each row; slots and lengths are those of the rows unless given."""
    rows = len(logits)
    slots = range(rows) if slots is None else slots
    lengths = [0] * len(table_rows) if lengths is None else lengths
    ints = (jnp.asarray(x, jnp.int32) for x in (slots, lengths))
    return np.asarray(sampler(jnp.asarray(logits, jnp.float32), *ints, make_table(table_rows))).tolist()


def kept_by(logits, top_k, top_p, min_p):
    """Which tokens of a row the filters keep, one filter after the other."""
    weights = np.exp(logits - logits.max())
    keep = weights >= min_p
    if top_k > 0:
        keep &= logits >= np.sort(logits[keep])[-min(top_k, keep.sum())]
    if top_p < 1:
        left = np.where(keep, weights, 0)
        enough = [limit for limit in logits[keep] if left[logits >= limit].sum() >= top_p * left.sum()]
        keep &= logits >= max(enough)
    return keep


@jax.jit
def kept(logits, top_k, top_p, min_p):
    return logits >= threshold(logits, top_k, top_p, min_p)[:, None]


near = st.integers(-20, 20).map(lambda i: i / 4)  # a coarse grid: many ties, and sums that differ clearly
far = st.sampled_from([-np.inf, -np.inf, -3e38, -1e30, -88.0, 88.0, 1e30, 3e38])
filter_rows = st.fixed_dictionaries(
    {
        "near": st.lists(near, min_size=VOCAB, max_size=VOCAB),
        "nudged": st.sets(st.integers(0, VOCAB - 1), max_size=6),  # up to the next float32
        "far": st.dictionaries(st.integers(1, VOCAB - 1), far, max_size=4),
        "top_k": st.just(0) | st.integers(1, VOCAB + 2) | st.just(2**31 - 1),
        "top_p": st.just(1.0) | st.floats(0, 1, width=32, allow_subnormal=False) | st.sampled_from([0.5, 0.9]),
        "min_p": st.just(0.0) | st.floats(0, 1, width=32, allow_subnormal=False) | st.sampled_from([0.1, 1.0]),
    }
)


@settings(max_examples=120, deadline=None)
@given(rows=st.lists(filter_rows, min_size=SEQS, max_size=SEQS))
def test_threshold_keeps_what_the_filters_say(rows):
    """Up to the rounding of float32, which matters only where a sum lies within 1e-5 of a limit."""
    logits = np.array([row["near"] for row in rows], np.float32)
    for i, row in enumerate(rows):
        for at in row["nudged"]:
            logits[i, at] = np.nextafter(logits[i, at], np.float32(np.inf))
        for at, value in row["far"].items():
            logits[i, at] = value
    columns = {name: [row[name] for row in rows] for name in ("top_k", "top_p", "min_p")}
    types = {"top_k": jnp.int32, "top_p": jnp.float32, "min_p": jnp.float32}
    result = np.asarray(kept(logits, **{name: jnp.asarray(columns[name], types[name]) for name in columns}))
    for i, row in enumerate(rows):
        x, k, p, m = logits[i].astype(np.float64), row["top_k"], row["top_p"], row["min_p"]
        fewest = kept_by(x, k, min(1, max(0, p - 1e-5) if p < 1 else 1), min(1, m * (1 + 1e-5)))
        most = kept_by(x, k, min(1, p + 1e-5), m * (1 - 1e-5))
        possible = np.isfinite(x)
        assert not (fewest & ~result[i] & possible).any(), "a token is lost"
        assert not (result[i] & ~most & possible).any(), "a token too many"


@both
def test_greedy_takes_the_first_of_the_best(sampler):
    logits = NORMAL.copy()
    logits[0, [3, 7]] = 9.0
    logits[1] = 0.0
    logits[2, :8] = -np.inf
    rows = [{"top_k": 1}, {}, {"top_p": 0.5}, {"temperature": 1.0}]
    assert draw(sampler, logits, rows)[:3] == [3, 0, int(np.argmax(logits[2]))]


@both
@pytest.mark.parametrize("temperature", [1e-30, 2e-38])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}])
def test_tiny_temperature_is_greedy(sampler, temperature, filters):
    rows = [{"temperature": temperature} | filters] * SEQS
    assert draw(sampler, NORMAL * 100, rows) == np.argmax(NORMAL, axis=1).tolist()


table_rows = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**64 - 1),
        "sample_index": st.integers(0, 127),
        "temperature": st.just(0.0) | st.floats(0.1, 2),
        "top_k": st.sampled_from([0, 0, 3]),
        "top_p": st.sampled_from([1.0, 1.0, 0.7]),
        "min_p": st.sampled_from([0.0, 0.0, 0.1]),
        "stop_ids": st.lists(st.integers(0, VOCAB - 1), max_size=3),
        "min_len": st.integers(0, 20),
    }
)


@both
def test_draw_depends_on_nothing_but_the_request(sampler):
    @settings(max_examples=60, deadline=None)
    @given(
        table=st.lists(table_rows, min_size=SLOTS, max_size=SLOTS),
        lengths=st.lists(st.integers(0, 20), min_size=SLOTS, max_size=SLOTS),
        slots=st.permutations(range(SLOTS + 1)),  # the last is padding
    )
    def check(table, lengths, slots):
        slots = slots[:SEQS]
        together = draw(sampler, NORMAL, table, slots=slots, lengths=lengths)
        for row, slot in enumerate(slots):
            if slot < SLOTS:
                alone = [NORMAL[row]] + [np.zeros(VOCAB)] * (SEQS - 1)
                its_table, its_lengths = [table[slot]] + [{}] * (SLOTS - 1), [lengths[slot]] + [0] * (SLOTS - 1)
                assert draw(sampler, alone, its_table, lengths=its_lengths)[0] == together[row]

    check()


@both
def test_key_is_seed_then_sample_index_then_position(sampler):
    """The same in every version, or seeded requests would change their text."""
    seed, sample_index, position = 2**63 + 12345, 3, 17
    key = jax.random.wrap_key_data(jnp.asarray(divmod(seed, 2**32), jnp.uint32), impl="threefry2x32")
    key = jax.random.fold_in(jax.random.fold_in(key, sample_index), position)
    noisy = NORMAL / 0.5 + jax.random.gumbel(key, (VOCAB,), jnp.float32)[None]
    row = {"seed": seed, "sample_index": sample_index, "temperature": 0.5}
    tokens = draw(sampler, NORMAL, [row] * SEQS, lengths=[position] * SEQS)
    assert tokens == jnp.argmax(noisy, axis=1).tolist()


DRAWS = 4000
LOGITS = np.array([1.0, 0.5, 0.5, 0.0, -0.5, -1.0, -2.0, -9.0])
many = SAMPLERS["plain"]


@pytest.mark.parametrize("varied", ["seed", "high word of seed", "sample_index", "position"])
def test_each_part_of_the_key_gives_independent_draws(varied):
    rows, lengths = [{"temperature": 1.0, "seed": 5} for _ in range(DRAWS)], [3] * DRAWS
    for i, row in enumerate(rows):
        if varied == "position":
            lengths[i] = i
        elif varied == "high word of seed":
            row["seed"] = i << 32
        else:
            row[varied] = i
    assert_follows(LOGITS, draw(many, [LOGITS] * DRAWS, rows, lengths=lengths), 1.0)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 4}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 5, "top_p": 0.8, "min_p": 0.15}]
)
def test_draws_follow_the_distribution(temperature, filters):
    rows = [{"temperature": temperature, "seed": i} | filters for i in range(DRAWS)]
    assert_follows(LOGITS, draw(many, [LOGITS] * DRAWS, rows), temperature, **filters)


def assert_follows(logits, tokens, temperature, *, top_k=0, top_p=1.0, min_p=0.0):
    """Pearson's chi-squared: with at most 7 degrees of freedom, 40 is exceeded once in 10^5 runs."""
    scaled = logits / temperature
    weights = np.where(kept_by(scaled, top_k, top_p, min_p), np.exp(scaled), 0)
    expected = weights / weights.sum() * len(tokens)
    counts = np.bincount(tokens, minlength=len(logits))
    likely = expected > 5
    assert counts[expected == 0].sum() == 0
    assert likely.sum() > 1 and abs(counts[~likely].sum() - expected[~likely].sum()) < 15
    assert ((counts - expected)[likely] ** 2 / expected[likely]).sum() < 40


def test_min_tokens_masks_only_its_own_stop_ids_and_only_before():
    logits = np.zeros((SEQS, VOCAB))
    logits[:, 3], logits[:, 5], logits[:, VOCAB - 1] = 9, 8, 7
    rows = [{"stop_ids": (3,), "min_len": 4}, {"stop_ids": (3,), "min_len": 3}, {}, {"stop_ids": (3, 5), "min_len": 9}]
    assert draw(SAMPLERS["full"], logits, rows, lengths=[3] * SEQS) == [5, 3, 3, VOCAB - 1]
    assert draw(SAMPLERS["plain"], logits, rows, lengths=[3] * SEQS) == [3] * SEQS


def test_masked_stop_ids_are_never_drawn():
    rows = [{"stop_ids": range(VOCAB - 2), "min_len": 100, "temperature": 2.0, "seed": i} for i in range(SEQS)]
    tokens = [token for length in range(20) for token in draw(SAMPLERS["full"], NORMAL, rows, lengths=[length] * SEQS)]
    assert set(tokens) == {VOCAB - 2, VOCAB - 1}


@both
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.nan, -np.inf])
def test_row_that_is_not_finite_says_so_and_leaves_its_neighbours(sampler, temperature, bad):
    rows = [{"temperature": temperature, "top_k": 3, "top_p": 0.9, "seed": i} for i in range(SEQS)]
    before = draw(sampler, NORMAL, rows)
    logits = NORMAL.copy()
    logits[1, slice(None) if bad == -np.inf else slice(4, 5)] = bad
    after = draw(sampler, logits, rows)
    assert NOT_FINITE not in before
    assert after == [before[0], NOT_FINITE, *before[2:]]


def test_only_rows_that_sample_write_the_slot_table():
    table = make_table([{}] * SLOTS)
    last_token = jnp.arange(100, 100 + SLOTS, dtype=jnp.int32)
    layout = SampleLayout(SEQS, SLOTS)
    packed = jnp.asarray([0, 1, 2, 3, 4, SLOTS, 1, SLOTS, 0], jnp.int32)
    logits, lengths, rules = jnp.asarray(NORMAL), jnp.zeros_like(last_token), rules_layout(VOCAB).empty(SLOTS)
    run = jax.jit(partial(sample_full_step, layout=layout))
    slots, rows, _ = run(last_token, lengths, join(table), rules, logits, logits, packed)
    tokens = rows[:, 0]
    best = np.argmax(NORMAL, axis=1)
    assert tokens.tolist() == [best[0], 0, best[2], 0]
    assert slots.tolist() == [100, best[2], 102, 103, best[0], 105]


def test_nothing_is_sorted():
    """XLA's sort and large top-k are slow on a GPU, and a sort of the vocabulary is slow everywhere."""
    sorts = re.compile(r"\bsort|\btop_?k\(", re.IGNORECASE)
    arguments = jnp.asarray(NORMAL), *(jnp.zeros(n, jnp.int32) for n in (SEQS, SLOTS)), make_table([{}] * SLOTS)
    for sampler in SAMPLERS.values():
        assert not sorts.search(sampler.lower(*arguments).compile().as_text())
    assert sorts.search(jax.jit(jnp.sort).lower(NORMAL).compile().as_text())
