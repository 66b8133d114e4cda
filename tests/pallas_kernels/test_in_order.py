"""Kernels of accelerators whose rows depend on no other row, interpreted: the same bits alone, among 64, in chunks of
any size, and wherever a row stands."""

import dataclasses
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.pallas_kernels import matmul
from jaxllm.pallas_kernels.matmul import gpu, tpu
from jaxllm.pallas_kernels.paged_attention import PagedBatch, gpu_in_order, kv_shape, tpu_plan
from jaxllm.pallas_kernels.paged_attention import tpu as tpu_attention
from jaxllm.pallas_kernels.row_sums import gpu as gpu_sums
from jaxllm.pallas_kernels.row_sums import reference
from jaxllm.pallas_kernels.row_sums import tpu as tpu_sums
from tests.seldom import all_but

TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}
PRODUCTS = {name: partial(module.einsum, interpret=True) for name, module in {"gpu": gpu, "tpu": tpu}.items()}
ATTENTION = {
    "gpu": partial(gpu_in_order.ragged_paged_attention, interpret=True),
    "tpu": partial(tpu_attention.ragged_paged_attention, batch_invariant=True, interpret=True),
}


def bits(x) -> np.ndarray:
    return np.asarray(x).astype(np.float32).view(np.int32)


def assert_same_bits(found, want) -> None:
    np.testing.assert_array_equal(bits(found), bits(want))


def draw(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def random(seed: int, *shape: int, dtype="float32") -> jax.Array:
    return jnp.asarray(draw(seed, *shape), dtype)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("platform", PRODUCTS)
def test_products(platform, dtype, transposed):
    """Of more rows than a tile has, more inputs than it takes at once, and outputs that fill none."""
    x, weight = random(0, 150, 300, dtype=dtype), random(1, 300, 90, dtype=dtype)
    product = jax.jit(partial(PRODUCTS[platform], "...d,vd->...v" if transposed else "...d,dv->...v"))
    operand = weight.T if transposed else weight
    whole = product(x, operand)
    for size in (1, 7, 64):
        chunks = [product(x[at : at + size], operand) for at in range(0, min(len(x), 16 * size), size)]
        assert_same_bits(np.concatenate(chunks), whole[: 16 * size])
    order = np.random.default_rng(2).permutation(len(x))
    assert_same_bits(product(x[order], operand), whole[order])
    want = np.asarray(x, np.float64) @ np.asarray(weight, np.float64)
    np.testing.assert_allclose(np.asarray(whole, np.float64), want, rtol=TOLERANCE[dtype], atol=30 * TOLERANCE[dtype])


@settings(max_examples=12, deadline=None)
@given(st.integers(1, 70), st.integers(1, 140), st.integers(1, 70), st.sampled_from(list(TOLERANCE)), st.data())
@pytest.mark.parametrize("platform", PRODUCTS)
def test_products_of_any_sizes(platform, rows, depth, columns, dtype, data):
    x, weight = random(0, rows, depth, dtype=dtype), random(1, depth, columns, dtype=dtype)
    product = partial(PRODUCTS[platform], "...d,dv->...v", out_dtype=jnp.float32)
    whole, row = product(x, weight), data.draw(st.integers(0, rows - 1))
    assert_same_bits(product(x[row : row + 1], weight), whole[row : row + 1])
    want = np.asarray(x, np.float64) @ np.asarray(weight, np.float64)
    np.testing.assert_allclose(whole, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("platform", PRODUCTS)
def test_products_have_the_references_shapes_and_gradients(platform):
    shapes = {"...ab,abc->...c": (3, 4, 5), "...a,abc->...bc": (20, 2, 9), "...a,abcd->...bcd": (20, 2, 3, 4)}
    for equation, shape in shapes.items():
        weight = random(0, *shape)
        x = random(1, 2, 6, *shape[: 2 if "ab," in equation else 1])

        def loss(x, weight, product, equation=equation):
            return jnp.sum(jnp.sin(product(equation, x, weight)))

        given = partial(PRODUCTS[platform], num_tokens=None), partial(matmul.einsum, implementation="reference")
        found, want = (jax.value_and_grad(loss, argnums=(0, 1))(x, weight, product) for product in given)
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


class Texts:
    """Sequences whose queries, keys and values are given: steps attend to some tokens of some of them."""

    BLOCK = 32
    MULTIPLE = {"gpu": 64, "tpu": 128}  # from whose multiples positions are counted in a window's view

    def __init__(self, platform: str, lengths, dtype="float32", pool_dtype=None, heads=4, kv_heads=2, **options):
        self.lengths, self.multiple, self.window = lengths, self.MULTIPLE[platform], options.get("sliding_window")
        self.num_blocks = -(-max(lengths) // self.BLOCK)  # of a sequence
        self.op = jax.jit(partial(ATTENTION[platform], scale=0.2, **options))
        sizes = heads, kv_heads, kv_heads
        self.texts = [
            [draw(7 * s + i, n, h, 64).astype(dtype) for i, h in enumerate(sizes)] for s, n in enumerate(lengths)
        ]
        num_blocks = len(lengths) * self.num_blocks
        shape = kv_shape(num_blocks + 1, self.BLOCK, kv_heads, 64, platform=platform)
        self.empty = jnp.full(shape, 0 if pool_dtype == "int8" else jnp.nan, pool_dtype or dtype)
        self.tables = np.random.default_rng(1).permutation(num_blocks).reshape(-1, self.num_blocks)

    def attend(self, steps) -> list[np.ndarray]:
        """Of each sequence what its tokens attend to; a step is a list of sequences and how many tokens each has."""
        pool, done = self.empty, np.zeros(len(self.lengths), int)
        found = [[] for _ in self.lengths]
        for step in steps:
            arrays = zip(*([x[done[s] : done[s] + n] for x in self.texts[s]] for s, n in step), strict=True)
            counts = [n for _, n in step]
            out, pool = self.op(*self.padded(arrays, sum(counts)), pool, self.batch(step, done))
            for (s, n), part in zip(step, np.split(bits(out)[: sum(counts)], np.cumsum(counts)[:-1]), strict=True):
                found[s].append(part)
                done[s] += n
        return [np.concatenate(parts) for parts in found if parts]

    def padded(self, arrays, tokens: int) -> list[jax.Array]:
        """To one of a few sizes, with NaN."""
        size = next(n for n in (16, 128, 320) if n >= tokens)
        rest = ((0, size - tokens), (0, 0), (0, 0))
        return [jnp.asarray(np.pad(np.concatenate(x), rest, constant_values=np.nan)) for x in arrays]

    def batch(self, step, done) -> PagedBatch:
        """With a window it has no blocks before it: positions count from a multiple of `multiple`, as in an engine."""
        rows, counts = [s for s, _ in step], [n for _, n in step]
        starts, tables = done[rows], self.tables[rows]
        if self.window is not None:
            first = np.maximum(starts - self.window + 1, 0)
            dead = np.arange(self.num_blocks)[None] < first[:, None] // self.BLOCK
            tables, first = np.where(dead, len(self.empty) - 1, tables), first // self.multiple * self.multiple
            tables = np.stack([np.roll(t, -at // self.BLOCK) for t, at in zip(tables, first, strict=True)])
            starts = starts - first
        missing = len(self.lengths) - len(step)
        decodes = next((i for i, n in enumerate(counts) if n > 1), len(counts))
        ints = (
            np.pad(tables, ((0, missing), (0, 0))),
            np.cumsum([0, *counts, *[0] * missing]),
            np.pad(starts + counts, (0, missing)),
            [decodes, len(step)],
        )
        return PagedBatch(*(jnp.asarray(x, jnp.int32) for x in ints))


def in_chunks(lengths, size: int, done=()):
    """Steps in which every sequence has `size` tokens, so long as it has some that are not `done`."""
    steps, left = [], list(np.asarray(lengths) - (done or 0))
    while any(left):
        steps.append([(s, int(min(size, n))) for s, n in enumerate(left) if n])
        left = [n - min(size, n) for n in left]
    return steps


CASES = {
    "bfloat16": {"dtype": "bfloat16"},
    "float32": {},
    "window": {"sliding_window": 45, "dtype": "bfloat16"},
    "short window": {"sliding_window": 3},
    "cap": {"soft_cap": 1.5, "heads": 6},
    "sinks": {"sinks": True, "dtype": "bfloat16", "kv_heads": 1},
    "int8": {"dtype": "bfloat16", "pool_dtype": "int8"},
}


@cache
def texts(platform: str, case: str, lengths) -> Texts:
    options = dict(CASES[case])
    if options.pop("sinks", False):
        options["sinks"] = random(9, options.get("heads", 4))
    if "pool_dtype" in options:
        options["kv_scales"] = jnp.full((2, 2), 0.03)
    return Texts(platform, lengths, **options)


@pytest.fixture
def small_tiles(monkeypatch):
    """So that texts have several of a TPU's tiles and passes."""

    def pick(shapes):
        return dataclasses.replace(tpu_plan.pick_tiles(shapes), queries=128, sub_queries=32, keys=128, edge=128)

    monkeypatch.setattr(tpu_attention, "pick_tiles", pick)


LENGTHS = (70, 1, 33, 170)
BEFORE = (50, 0, 30, 140)
SCHEDULES = {
    "together": [list(enumerate(LENGTHS))],
    "in another order": [[*enumerate(LENGTHS)][::-1]],
    "chunks of 64": in_chunks(LENGTHS, 64),
    "chunks of 7": [[(s, n) for s, n in enumerate(BEFORE) if n], *in_chunks(LENGTHS, 7, BEFORE)],
    "decodes": [[(0, 69), (2, 32), (3, 169)], [(0, 1), (2, 1), (3, 1), (1, 1)]],
    "decodes beside chunks": [
        [(3, 130)],
        [(3, 1), (0, 5)],
        [(3, 1), (0, 34)],
        [(0, 30), (3, 38)],
        [(0, 1), (1, 1), (2, 33)],
    ],
}


@pytest.mark.parametrize(
    ("platform", "case"),
    all_but(
        [("gpu", "float32"), ("gpu", "cap"), ("tpu", "bfloat16")],
        [(platform, case) for platform in ATTENTION for case in CASES],
    ),
)
def test_attention(platform, case, small_tiles):
    """Whole texts alone, and all together in any chunks."""
    of = texts(platform, case, LENGTHS)
    alone = [of.attend([[(s, n)]])[0] for s, n in enumerate(LENGTHS)]
    for name, steps in SCHEDULES.items():
        for found, want in zip(of.attend(steps), alone, strict=True):
            np.testing.assert_array_equal(found, want, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_decodes_among_64(platform, small_tiles):
    """The last two tokens one at a time, beside 63 others."""
    lengths = (12, *(2 + s % 10 for s in range(1, 64)))
    of, known = texts(platform, "bfloat16", lengths), [(s, n - 2) for s, n in enumerate(lengths) if n > 2]
    together = of.attend([known, *[[(s, 1) for s in range(64)]] * 2])
    for s in (0, 1, 40, 63):
        np.testing.assert_array_equal(together[s], of.attend([[(s, lengths[s])]])[0])


SUMS = {"reference": reference.row_sums} | {
    name: partial(module.row_sums, interpret=True) for name, module in {"gpu": gpu_sums, "tpu": tpu_sums}.items()
}


@pytest.mark.parametrize("width", [1, 50, 128, 5000])
@pytest.mark.parametrize("name", SUMS)
def test_sums_of_rows(name, width):
    x, sums = random(0, 9, 3, width), SUMS[name]
    whole = sums(x)
    assert whole.shape == (9, 3, 1)
    for size in (1, 4):
        assert_same_bits(np.concatenate([sums(x[at : at + size]) for at in range(0, 8, size)]), whole[:8])
    np.testing.assert_allclose(whole, np.sum(np.asarray(x, np.float64), axis=-1, keepdims=True), atol=1e-4)
    np.testing.assert_array_equal(jax.grad(lambda x: jnp.sum(sums(x)))(x), jnp.ones_like(x))
