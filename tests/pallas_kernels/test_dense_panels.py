"""Dense weights in panels: every instruction set makes of them, in memory that ends where the arrays do, what it makes
of the same weights as they were, to the bit."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.pallas_kernels import native
from jaxllm.pallas_kernels.gated.native import gated_panel_product
from jaxllm.pallas_kernels.matmul import panels as in_panels
from tests.pallas_kernels.guarded import call, fuzzed, with_each_set

pytestmark = pytest.mark.skipif(not native.is_built(), reason="not built: python -m jaxllm.pallas_kernels.native.build")

BF16 = ml_dtypes.bfloat16
KINDS = [*((np.float32, held) for held in (np.float32, BF16, np.float16)), (BF16, BF16)]  # of rows, and of the weight
ALL, NOTHING = np.zeros(0, np.int32), np.zeros(0, np.float32)

rows_of_x = st.integers(1, 30) | st.integers(31, 300)
pairs = st.integers(1, 40) | st.sampled_from([63, 64, 65, 127, 128, 129, 255, 256, 257, 300])
panels_of_w = st.integers(1, 5) | st.sampled_from([8, 9, 16, 17, 33])
kinds, threads, seeds = st.sampled_from(KINDS), st.integers(1, 3), st.integers(0, 2**16)


def laid_out(weight):
    panels = np.empty((*weight.shape[:-2], *in_panels.panels_shape(*weight.shape[-2:], weight.dtype)), weight.dtype)
    in_panels.put_in_panels(weight, panels)
    return panels


def bits(array):
    return array.view(np.uint16 if array.dtype == BF16 else np.uint32)


@fuzzed
@given(rows_of_x, pairs, panels_of_w, kinds, st.booleans(), st.booleans(), threads, seeds)
def test_products(rows, pairs, panels, kinds, rounds, batch_invariant, threads, seed):
    rng, (dtype, held) = np.random.default_rng(seed), kinds
    x, columns = rng.normal(size=(rows, 2 * pairs)).astype(dtype), in_panels.PANEL * panels
    weight, options = rng.normal(size=(2 * pairs, columns)).astype(held), {"threads": threads}
    options |= {"transposed": False, "batch_invariant": batch_invariant and dtype == held}
    used = int(rng.integers(rows + 1))
    x[used:] = np.nan
    result = (rows, columns), dtype if rounds else np.float32

    def of_one_set():
        given = [x, weight, np.array([used], np.int32)]
        (want,) = call("jaxllm_matmul", given, [result], **options)
        given[1] = laid_out(weight)
        (got,) = call("jaxllm_matmul", given, [result], **options)
        np.testing.assert_array_equal(bits(got[:used]), bits(want[:used]))

    with_each_set(of_one_set)


@fuzzed
@given(rows_of_x, pairs, st.integers(1, 9), kinds, st.booleans(), threads, seeds)
def test_gated_products(rows, pairs, panels, kinds, is_gelu, threads, seed):
    rng, (dtype, held) = np.random.default_rng(seed), kinds
    x, width = rng.normal(size=(rows, 2 * pairs)).astype(dtype), in_panels.PANEL * panels
    # Gates so far from 0 that results are subnormal some threads flush, and some don't.
    weight = (rng.normal(size=(2 * pairs, 2 * width)) / (2 * pairs) ** 0.5).astype(held)
    options = {"batch_invariant": False, "is_gelu": is_gelu, "threads": threads}

    def of_one_set():
        want, got = (
            call("jaxllm_gated_matmul", [x, w, ALL], [((rows, width), dtype)], **options)[0]
            for w in (weight, laid_out(weight))
        )
        np.testing.assert_array_equal(bits(got), bits(want))

    with_each_set(of_one_set)


@fuzzed
@given(
    st.lists(st.integers(0, 5) | st.sampled_from([12, 13, 100, 241]), min_size=1, max_size=5),
    *(pairs, st.integers(1, 5), kinds, threads, seeds),
)
def test_products_of_experts(lengths, pairs, panels, kinds, threads, seed):
    rng, (dtype, held) = np.random.default_rng(seed), kinds
    offsets, columns = np.cumsum([1, *lengths], dtype=np.int32), in_panels.PANEL * panels
    x = rng.normal(size=(offsets[-1] + 2, 2 * pairs)).astype(dtype)
    weight = rng.normal(size=(len(lengths), 2 * pairs, columns)).astype(held)

    def of_one_set():
        want, got = (
            call(
                *("jaxllm_grouped_matmul", [x, offsets, w, *[NOTHING] * 3], [((len(x), columns), dtype)]),
                **{"by_output": False, "threads": threads},
            )[0]
            for w in (weight, laid_out(weight))
        )
        np.testing.assert_array_equal(bits(got), bits(want))

    with_each_set(of_one_set)


@pytest.mark.parametrize(
    ("shape", "dtype", "options"),
    [
        ((2, 8, 16), np.float32, {}),  # panels of another width
        ((2, 9, 32), np.float32, {}),  # inputs
        ((2, 8, 32, 2), np.float32, {}),  # one of bfloat16
        ((2, 8, 32), BF16, {}),  # one of float32
        ((2, 4, 32, 1), BF16, {}),
        ((2, 4, 32, 2), np.float16, {}),
        ((2, 8, 32), np.float32, {"transposed": True}),
        ((3, 8, 32), np.float32, {}),  # outputs
    ],
)
def test_other_shapes_are_refused(shape, dtype, options):
    options = {"transposed": False, "batch_invariant": False, "threads": 1} | options
    with pytest.raises(ValueError, match="don't go together"):
        call("jaxllm_matmul", [np.ones((3, 8), dtype), np.ones(shape, dtype), ALL], [((3, 64), dtype)], **options)


def test_a_gate_that_ends_within_a_panel_is_refused():
    options = {"batch_invariant": False, "is_gelu": False, "threads": 1}
    given = [np.ones((3, 8), np.float32), np.ones((1, 8, 32), np.float32), ALL]
    with pytest.raises(ValueError, match="don't go together"):
        call("jaxllm_gated_matmul", given, [((3, 16), np.float32)], **options)


@pytest.mark.parametrize("lead", [(), (3,)])
@pytest.mark.parametrize("dtype", [np.float32, BF16, np.float16])
def test_there_and_back(lead, dtype):
    weight = np.random.default_rng(0).normal(size=(*lead, 600, 96)).astype(dtype)
    panels = jnp.asarray(laid_out(weight))
    np.testing.assert_array_equal(jax.jit(in_panels.from_panels)(panels), weight)
    if not lead:
        ids = jnp.asarray([95, 0, 31, 32, 32])
        np.testing.assert_array_equal(in_panels.columns(panels, ids), weight[:, ids].astype(np.float32))


def test_what_fits():
    assert in_panels.fits(7, 64, np.float32) and in_panels.fits(8, 64, BF16)
    assert not in_panels.fits(7, 64, BF16) and not in_panels.fits(8, 48, np.float32)
    assert in_panels.fits(7, 64, np.float16) and not in_panels.fits(8, 64, np.int8)


def test_gradients():
    rng = np.random.default_rng(0)
    x, weight = (rng.normal(size=shape).astype(np.float32) for shape in ((5, 8), (8, 64)))
    x = jnp.asarray(x)
    panels = jnp.asarray(laid_out(weight))

    def loss(x, panels):
        y = in_panels.panel_product(x, panels, num_inputs=1, outputs=(2, 32))
        return jnp.sum(jnp.sin(y)) + jnp.sum(gated_panel_product(x, panels, "silu"))

    def wanted(x, weight):
        y = (x @ weight).reshape(-1, 2, 32)
        return jnp.sum(jnp.sin(y)) + jnp.sum(jax.nn.silu(y[:, 0]) * y[:, 1])

    got, want = jax.grad(loss, (0, 1))(x, panels), jax.grad(wanted, (0, 1))(x, weight)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(in_panels.from_panels(got[1]), want[1], rtol=1e-4, atol=1e-5)


def test_mapped():
    """As a module may be called that is the engine's own."""
    rng = np.random.default_rng(0)
    x, weight = (rng.normal(size=shape).astype(np.float32) for shape in ((3, 5, 8), (8, 32)))
    panels = jnp.asarray(laid_out(weight))
    got = jax.vmap(lambda x: in_panels.panel_product(x, panels, num_inputs=1, outputs=(32,)))(x)
    np.testing.assert_allclose(got, x @ weight, rtol=1e-4, atol=1e-5)
