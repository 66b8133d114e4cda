"""The sampling kernels against numpy and the reference: the best tokens, draws, filters, noise; and nobody sorts."""

import contextlib
import dataclasses
import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractDevice

from jaxllm.engine.config import EngineConfig
from jaxllm.engine.device.columns import join
from jaxllm.engine.device.executables import sample_full_step
from jaxllm.engine.device.lowering import Lowering
from jaxllm.engine.device.model_shape import model_shape
from jaxllm.engine.device.packing import SampleLayout
from jaxllm.engine.device.sampler import sample
from jaxllm.engine.device.state import SAMPLING_LAYOUT, empty_slots, rules_layout
from jaxllm.pallas_kernels import native, sampling
from jaxllm.pallas_kernels.dispatch import Placement
from jaxllm.pallas_kernels.sampling import api, gpu, gpu_noise, reference
from jaxllm.sharding.mesh import make_mesh
from tests.engine.device.test_sampler import kept_by

ROWS, VOCAB = 8, 301  # fills no vector or tile; with ties for all, more than a GPU program puts aside
KERNELS = [
    pytest.param("native", marks=pytest.mark.skipif(not native.is_built(), reason="the library is not built")),
    "gpu",
]
each = pytest.mark.parametrize("kernel", KERNELS)
NORMAL = np.random.default_rng(0).normal(size=(ROWS, VOCAB)).astype(np.float32) * 3


@cache
def op(name, kernel, **options):
    """A compiled one; GPU kernels are interpreted."""
    if kernel == "gpu":
        return jax.jit(partial(getattr(gpu, name), interpret=True, **options))
    return jax.jit(partial(getattr(sampling, name), implementation=kernel, **options))


def best(kernel, scores, logits, k, tokens=None):
    tokens = np.zeros((len(scores), 0), np.int32) if tokens is None else tokens
    arrays = [jnp.asarray(x) for x in (scores, logits, tokens)]
    if kernel == "gpu":
        return op("best", kernel, k=k)(*arrays)
    return op("best", kernel, k=k)(arrays[0], arrays[1], tokens=arrays[2])


def keys_of(rows, seed=0):
    return np.random.default_rng(seed).integers(0, 2**32, size=(rows, 2), dtype=np.uint32)


def draw(kernel, logits, temperature, top_k=0, top_p=1.0, min_p=0.0, *, seed=0):
    """Tokens, and the largest logits; a parameter is that of all rows, or a list."""
    rows = len(logits)
    dtypes = jnp.float32, jnp.int32, jnp.float32, jnp.float32
    columns = [
        jnp.asarray(np.broadcast_to(value, rows), dtype)
        for value, dtype in zip((temperature, top_k, top_p, min_p), dtypes, strict=True)
    ]
    result = op("draw", kernel)(jnp.asarray(logits, jnp.float32), *columns, jnp.asarray(keys_of(rows, seed)))
    return np.asarray(result.tokens), np.asarray(result.top)


def check_best(kernel, scores, logits, k):
    scores, logits = scores.astype(np.float32), logits.astype(np.float32)
    tokens = np.random.default_rng(1).integers(0, VOCAB, size=(len(scores), 2)).astype(np.int32)
    found = jax.tree.map(np.asarray, best(kernel, scores, logits, k, tokens))
    want = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    np.testing.assert_array_equal(found.ids, want)
    np.testing.assert_array_equal(found.scores, np.take_along_axis(scores, want, axis=1))
    own = np.take_along_axis(logits, np.concatenate([want, tokens], axis=1), axis=1)
    np.testing.assert_array_equal(found.logits, own)
    ranks = 1 + (logits[:, None, :] > own[:, :, None]).sum(axis=-1)
    counts = np.concatenate([found.scores > -np.inf, np.ones_like(tokens, bool)], axis=1)
    np.testing.assert_array_equal(found.ranks[counts], ranks[counts])


@each
@pytest.mark.parametrize("k", [20, 64])
@pytest.mark.parametrize(
    "scores",
    [
        NORMAL - 1,
        np.round(NORMAL) + 0.0,
        np.zeros_like(NORMAL),
        NORMAL + NORMAL[::-1] * 2,
        0.0 - NORMAL,
        np.where(NORMAL > 0, -np.inf, NORMAL),
        np.where(np.arange(VOCAB) < VOCAB - 5, -np.inf, NORMAL),
        np.full_like(NORMAL, -np.inf),
        np.where(NORMAL > 1, 3e38, -3e38),
    ],
    ids=["shifted", "ties", "equal", "biased", "reversed", "masked", "few", "none", "huge"],
)
def test_best_are_those_of_numpy(kernel, scores, k):
    """Best first, the smaller id first among equals, also where all are."""
    check_best(kernel, scores, NORMAL, k)


@each
def test_best_of_the_logits_themselves(kernel):
    check_best(kernel, NORMAL, NORMAL, 20)
    check_best(kernel, np.round(NORMAL) + 0.0, np.round(NORMAL) + 0.0, 20)


@pytest.mark.parametrize("scores", [NORMAL, np.round(NORMAL) + 0.0], ids=["all differ", "ties"])
def test_best_in_parts_are_the_best_at_once(scores):
    arrays = [jnp.asarray(x) for x in (scores, NORMAL, np.zeros((ROWS, 1), np.int32))]
    whole, parts = (jax.jit(partial(reference.best, k=40, at_once=n))(*arrays) for n in (None, 16))
    jax.tree.map(np.testing.assert_array_equal, parts, whole)


@each
@pytest.mark.parametrize("vocab", [16, 64, 100])
def test_best_of_a_small_vocabulary(kernel, vocab):
    scores = np.round(NORMAL[:, :vocab] * 2) + 0.0
    for k in {min(vocab, 16), min(vocab, 64)}:
        found = best(kernel, scores, scores, k)
        np.testing.assert_array_equal(found.ids, np.argsort(-scores, axis=1, kind="stable")[:, :k])


@each
def test_best_beside_rows_that_are_not_finite(kernel):
    logits = NORMAL.copy()
    logits[1], logits[3, 7], logits[5] = np.nan, np.nan, np.inf
    found = best(kernel, logits, logits, 20)
    fine = [0, 2, 4, 6, 7]
    np.testing.assert_array_equal(np.asarray(found.ids)[fine], np.argsort(-NORMAL, axis=1, kind="stable")[fine, :20])
    assert np.asarray(found.ids).min() >= 0 and np.asarray(found.ids).max() < VOCAB


def test_normalizers_are_those_of_the_reference():
    logits = NORMAL.copy()
    logits[0], logits[1, 3], logits[2, 4], logits[3, :300] = -np.inf, np.inf, np.nan, -np.inf
    logits[4] *= 1e30
    want = op("normalize", "reference")(jnp.asarray(logits))
    got = op("normalize", "native")(jnp.asarray(logits)) if native.is_built() else want
    np.testing.assert_array_equal(got.top, want.top)
    np.testing.assert_allclose(got.normalizer, want.normalizer, rtol=1e-6)
    exact = np.log(np.exp(NORMAL[5:].astype(np.float64)).sum(axis=1))
    np.testing.assert_allclose(want.normalizer[5:], exact, rtol=1e-6)


FILTERS = {
    "temperature": [0, 1, 1, 1, 0.7, 2, 1, 5],
    "top_k": [0, 0, 5, 0, 300, 100, 1, 0],
    "top_p": [1, 1, 1, 0.9, 0.5, 0.95, 1, 1 - 2**-24],
    "min_p": [0, 0, 0, 0, 0, 0.01, 0, 0],
}
MORE = {
    "temperature": [1, 1, 0.01, 30, 1, 1, 1, 1],
    "top_k": [2**31 - 1, VOCAB, 0, 0, 0, 3, 0, 250],
    "top_p": [1, 0.9, 0.9, 0.9, 1e-30, 0.9, 0, 1],
    "min_p": [0.5, 0, 0, 0, 0, 1.0, 1e-38, 0],
}


@each
@pytest.mark.parametrize("filters", [FILTERS, MORE])
@pytest.mark.parametrize("scale", [0.01, 1, 30])
def test_draws_are_those_of_the_reference(kernel, filters, scale):
    for seed in range(8):
        got, top = draw(kernel, NORMAL * scale, **filters, seed=seed)
        want, want_top = draw("reference", NORMAL * scale, **filters, seed=seed)
        np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(top, want_top)


@each
def test_draws_with_the_other_bits_of_jax_random(kernel):
    """`jax_threefry_partitionable` off: the bits of a pair are two tokens'."""
    logits = jnp.asarray(NORMAL)
    columns = [jnp.full(ROWS, value, dtype) for value, dtype in ((1, jnp.float32), (0, jnp.int32), (1, jnp.float32))]

    def tokens(kernel, width):
        fn = partial(gpu.draw, interpret=True) if kernel == "gpu" else partial(api.draw, implementation=kernel)
        arrays = logits[:, :width], *columns, jnp.zeros(ROWS), jnp.asarray(keys_of(ROWS))
        return jax.jit(fn)(*arrays).tokens.tolist()

    on = tokens("reference", VOCAB)
    with jax.threefry_partitionable(False):
        off = [tokens("reference", width) for width in (VOCAB, VOCAB - 1)]
        assert [tokens(kernel, width) for width in (VOCAB, VOCAB - 1)] == off
    assert on != off[0]


@each
@pytest.mark.parametrize("filters", [{}, {"top_k": 4}, {"top_p": 0.7}, {"min_p": 0.2}])
def test_draws_follow_the_distribution(kernel, filters):
    """Pearson's chi-squared: with at most 15 degrees of freedom, 60 is exceeded once in 10^6 runs."""
    draws, logits = 2000, np.linspace(1, -3, 16)
    tokens, _ = draw(kernel, np.tile(logits, (draws, 1)), 0.8, **filters)
    scaled = (logits / 0.8).astype(np.float64)
    kept = kept_by(scaled, **({"top_k": 0, "top_p": 1.0, "min_p": 0.0} | filters))
    weights = np.where(kept, np.exp(scaled), 0)
    expected = weights / weights.sum() * draws
    counts = np.bincount(tokens, minlength=16)
    assert counts[~kept].sum() == 0 and kept.sum() > 1
    assert ((counts - expected)[kept] ** 2 / expected[kept]).sum() < 60


near = st.integers(-12, 12).map(lambda i: i / 4)  # a coarse grid: many ties, and sums that differ clearly
filter_rows = st.fixed_dictionaries(
    {
        "logits": st.lists(near | st.sampled_from([-np.inf, -88.0, 3e38, -3e38]), min_size=16, max_size=16),
        "top_k": st.sampled_from([0, 1, 2, 5, 15, 16, 99]),
        "top_p": st.sampled_from([1.0, 1e-9, 0.1, 0.5, 0.9, 0.99]),
        "min_p": st.sampled_from([0.0, 1e-6, 0.1, 0.5, 1.0]),
    }
)


@each
@settings(max_examples=40, deadline=None)
@given(rows=st.lists(filter_rows, min_size=4, max_size=4), seed=st.integers(0, 2**20))
def test_filters_keep_what_the_reference_keeps(kernel, rows, seed):
    """Of 32 draws of each row, all are what the reference draws, unless a sum lies within rounding of a limit."""
    logits = np.array([row["logits"] for row in rows], np.float32).repeat(32, axis=0)
    filters = {name: np.repeat([row[name] for row in rows], 32) for name in ("top_k", "top_p", "min_p")}
    got, _ = draw(kernel, logits, 1.0, **filters, seed=seed)
    want, top = draw("reference", logits, 1.0, **filters, seed=seed)
    for i, row in enumerate(rows):
        x, k, p, m = np.array(row["logits"]), row["top_k"], row["top_p"], row["min_p"]
        if not np.isfinite(top[32 * i]):
            continue
        fewest = kept_by(x, k, p - 1e-5 if p < 1 else 1, min(1, m * (1 + 1e-5)))
        most = kept_by(x, k, min(1, p + 1e-5), m * (1 - 1e-5))
        mine = slice(32 * i, 32 * (i + 1))
        if (fewest == most)[np.isfinite(x)].all():
            np.testing.assert_array_equal(got[mine], want[mine])
        assert most[got[mine]].all()


@each
def test_rows_that_are_not_finite_say_so_and_leave_their_neighbours(kernel):
    before, _ = draw(kernel, NORMAL, **FILTERS)
    logits = NORMAL.copy()
    logits[1, 5], logits[2, 300], logits[4, 0], logits[6] = np.nan, -np.nan, np.inf, -np.inf
    tokens, top = draw(kernel, logits, **FILTERS)
    fine = [0, 3, 5, 7]
    np.testing.assert_array_equal(tokens[fine], before[fine])
    np.testing.assert_array_equal(np.isfinite(top), np.isin(np.arange(ROWS), fine))
    assert np.isnan(top[[1, 2]]).all() and top[4] == np.inf and top[6] == -np.inf


def test_the_kernel_s_logarithm_is_good_to_two_units_in_the_last_place():
    rng = np.random.default_rng(0)
    near_one = 1 - np.arange(1, 2000, dtype=np.float32) * np.float32(2**-23)
    x = np.concatenate([rng.uniform(size=5000).astype(np.float32), near_one, np.float32([gpu_noise.TINY, 87.3, 1e-7])])
    got = np.asarray(jax.jit(gpu_noise.log)(jnp.asarray(x))).astype(np.float64)
    want = np.log(x.astype(np.float64))
    assert (np.abs(got - want) <= 2 * np.spacing(np.abs(want).astype(np.float32))).all()


CONFIG = EngineConfig(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=8, block_size=4, num_blocks=32)
SORT = re.compile(r"\bsort\(")


@pytest.mark.parametrize("devices", [1, 2])
def test_no_compiled_sampler_sorts(tiny, devices):
    mesh = make_mesh(f"tensor={devices}")
    lowering = Lowering(model_shape(tiny.cfg, *nnx.split(tiny.model), mesh), CONFIG, mesh)
    layout = SampleLayout(4, CONFIG.max_num_seqs)
    for lowered in (
        lowering.lower_sample(layout),
        lowering.lower_sample_full(layout),
        lowering.lower_prompt_logprobs(),
    ):
        text = lowered.compile().as_text()
        assert not SORT.search(text)
        assert ("jaxllm_" in text) == (devices == 1 and native.is_built())
    assert SORT.search(jax.jit(jnp.sort).lower(NORMAL).compile().as_text())


def on_a_gpu():
    """Pallas asks which GPU it lowers for, since JAX 0.11."""
    if jax.__version_info__ < (0, 11):
        return contextlib.nullcontext()
    device = AbstractDevice("NVIDIA H200", 132, "gpu")
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_no_lowered_sampler_sorts(monkeypatch, platform):
    kernel = "gpu" if platform == "cuda" else "reference"
    for name, chosen in ("NORMALIZE", "reference"), ("DRAW", kernel), ("BEST", kernel):
        monkeypatch.setattr(api, name, dataclasses.replace(getattr(api, name), preferred={"cpu": (chosen,)}))
    slots = jax.eval_shape(partial(empty_slots, 4, ((1, 8),)))
    table, rules = jax.eval_shape(lambda: (SAMPLING_LAYOUT.empty(4), rules_layout(5000).empty(4)))
    logits, ints = jax.ShapeDtypeStruct((4, 5000), jnp.float32), slots.length

    def lower(fn, *arguments):
        with on_a_gpu():
            traced = jax.jit(partial(fn, placement=Placement.default())).trace(*arguments)
            return traced.lower(lowering_platforms=(platform,)).as_text()

    plain = lower(sample, logits, ints, slots.length, table)
    layout, packed = SampleLayout(4, 4), jax.ShapeDtypeStruct((9,), jnp.int32)
    fn = partial(sample_full_step, layout=layout)
    full = lower(fn, slots.last_token, slots.length, jax.eval_shape(join, table), rules, logits, logits, packed)
    assert "stablehlo.sort" not in plain + full
    assert ("chlo.top_k" in full) == (platform == "tpu")
    if platform == "cuda":
        assert "jaxllm_draw" in plain and "jaxllm_best" in full
        assert "stablehlo.while" not in plain
        # Those of `threshold`, in the branch that log-probabilities of the "sampled" distribution take.
        assert full.count("stablehlo.while") == 2
