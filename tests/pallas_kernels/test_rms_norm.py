"""Root mean square normalisation for CPUs in C++ against its definition."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.pallas_kernels import native
from jaxllm.pallas_kernels.rms_norm import rms_norm

pytestmark = pytest.mark.skipif(not native.exists(), reason="the C++ kernels are not built")
HALF_STEP = 2.0**-8  # of bfloat16, relative


def random(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 9),
    st.integers(1, 150),
    st.sampled_from(["float32", "bfloat16"]),
    st.sampled_from(["float32", "bfloat16"]),
    st.sampled_from([{}, {"scales_first": True}, {"scales_first": True, "unit_offset": True}]),
    st.booleans(),
)
def test_equals_its_definition(tokens, width, dtype, scale_dtype, options, has_added):
    x, added = (jnp.asarray(random(i, tokens, 3, width), dtype) for i in range(2))
    scale = jnp.asarray(random(2, width), scale_dtype)
    args = x, added if has_added else None, scale
    got, want = (rms_norm(*args, eps=1e-5, implementation=name, **options) for name in ("native", "reference"))
    np.testing.assert_array_equal(*(np.asarray(total, np.float32) for total in (got[0], want[0])))
    np.testing.assert_allclose(
        *(np.asarray(y, np.float32) for y in (got[1], want[1])),
        rtol=2 * HALF_STEP if dtype == "bfloat16" else 1e-5,
        atol=1e-6,
    )


def test_a_row_is_the_same_beside_any_others():
    x, scale = jnp.asarray(random(0, 9, 80)), jnp.asarray(random(1, 80))
    _, alone = rms_norm(x[3:4], None, scale, eps=1e-6, implementation="native")
    _, beside = rms_norm(x, None, scale, eps=1e-6, implementation="native")
    np.testing.assert_array_equal(np.asarray(alone[0]), np.asarray(beside[3]))
