"""What layers do between their products, in C++, against its definition."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.pallas_kernels import native
from jaxllm.pallas_kernels.addition.api import OP as ADDITION
from jaxllm.pallas_kernels.addition.api import add
from jaxllm.pallas_kernels.dispatch import UNPLACED, Placement
from jaxllm.pallas_kernels.gated import gated, gated_product
from jaxllm.pallas_kernels.gated.native import KINDS
from jaxllm.pallas_kernels.rotary import rotate, rotate_qkv

pytestmark = pytest.mark.skipif(not native.is_built(), reason="not built: python -m jaxllm.pallas_kernels.native.build")
TOLERANCE = {jnp.float32: 2e-6, jnp.bfloat16: 1e-2}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("heads", "head_dim", "pairs"), [(1, 2, 1), (3, 64, 32), (2, 80, 20), (4, 72, 36)])
def test_rotations(heads, head_dim, pairs, interleaved, dtype):
    """Also of some features alone, and such as fill no vector."""
    rng = np.random.default_rng(0)
    for tokens in (1, 3, 500):
        x = jnp.asarray(rng.normal(size=(tokens, heads, head_dim)), dtype)
        angle = rng.normal(size=(tokens, 1, pairs)).astype(np.float32)
        sin, cos = jnp.sin(angle), jnp.cos(angle)
        got, want = (
            rotate(x, sin, cos, interleaved=interleaved, implementation=name) for name in ("native", "reference")
        )
        assert got.dtype == dtype
        np.testing.assert_allclose(*(np.asarray(each, np.float32) for each in (got, want)), atol=4 * TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("lead", [(), (7,), (2, 5)])
def test_rotations_of_queries_keys_and_values(lead, dtype):
    """And their gradients."""
    rng = np.random.default_rng(0)
    qkv = jnp.asarray(rng.normal(size=(*lead, 2, 5, 16)), dtype)
    angle = jnp.asarray(rng.normal(size=(*lead, 1, 8)), jnp.float32)
    sin, cos = jnp.sin(angle), jnp.cos(angle)

    def of(name):
        def loss(qkv):
            made = rotate_qkv(qkv, sin, cos, implementation=name)
            return sum(jnp.sum(jnp.square(each.astype(jnp.float32))) for each in made), made

        return jax.grad(loss, has_aux=True)(qkv)

    (slope, got), (wanted, want) = of("native"), of("reference")
    assert [each.shape for each in got] == [(*lead, 6, 16), (*lead, 2, 16), (*lead, 2, 16)]
    for each, expected in zip((*got, slope), (*want, wanted), strict=True):
        assert each.dtype == dtype and each.shape == expected.shape
        close = 4 * TOLERANCE[dtype]
        np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (each, expected)), atol=close, rtol=close)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("lead", [(), (1,), (3, 50)])
def test_gated_products(lead, dtype):
    """And their gradients."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(*lead, 24)), dtype)
    weight = jnp.asarray(rng.normal(size=(24, 2, 40)) / 24**0.5, dtype)

    def of(name):
        def loss(x, weight):
            made = gated_product(x, weight, "silu", implementation=name)
            return jnp.sum(jnp.square(made.astype(jnp.float32))), made

        return jax.grad(loss, (0, 1), has_aux=True)(x, weight)

    (slopes, got), (wanted, want) = of("native"), of("reference")
    assert got.shape == (*lead, 40)
    for each, expected in zip((got, *slopes), (want, *wanted), strict=True):
        assert each.dtype == dtype and each.shape == expected.shape
        each, expected = (np.asarray(y, np.float32) for y in (each, expected))
        np.testing.assert_allclose(each, expected, atol=2 * TOLERANCE[dtype] * np.abs(expected).max())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("activation", KINDS)
@pytest.mark.parametrize("width", [1, 33, 256])
def test_gated_activations(activation, width, dtype):
    rng = np.random.default_rng(0)
    for tokens in (1, 200):
        both = rng.normal(size=(tokens, 2, width)) * 10.0 ** rng.integers(-3, 3, (tokens, 2, 1))
        both = jnp.asarray(both, dtype)
        got = gated(both, activation, implementation="native")
        want = gated(both.astype(jnp.float32), activation, implementation="reference")
        assert got.dtype == dtype and got.shape == want.shape
        sizes = 1e-6 + np.abs(np.asarray(both[:, 0], np.float32) * np.asarray(both[:, 1], np.float32))
        assert (np.abs(np.asarray(got, np.float32) - np.asarray(want)) <= TOLERANCE[dtype] * sizes).all()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_sums_of_a_step_equal_their_definition_to_the_bit(dtype, batch_invariant):
    rng = np.random.default_rng(0)
    x, h = (jnp.asarray(rng.normal(size=(7, 40)), dtype) for _ in range(2))
    placement = replace(Placement.default(), batch_invariant=batch_invariant)
    used = jnp.int32(5)
    got = jax.jit(lambda x, h: add(x, h, num_tokens=used, placement=placement))(x, h)
    want = add(x, h)
    assert got.dtype == dtype
    np.testing.assert_array_equal(*(np.asarray(each[:5], np.float32) for each in (got, want)))


def test_sums_are_in_c_where_rows_pad_and_xla_elsewhere():
    x, y, used = jnp.zeros((3, 4)), jnp.zeros((3, 4), jnp.bfloat16), jnp.int32(2)
    here = Placement.default()
    calls = [(here, x, x, used), (here, x, x, None), (UNPLACED, x, x, used), (here, x, y, used)]
    assert [ADDITION.preferred_at(*call) for call in calls] == ["native", *["reference"] * 3]
