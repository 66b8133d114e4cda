"""Arrays of zeros: what every implementation makes, and that the native one takes no memory for them."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.pallas_kernels import native
from jaxllm.pallas_kernels.dispatch import UNPLACED, Placement
from jaxllm.pallas_kernels.zeros.api import OP, zeros

needs_library = pytest.mark.skipif(not native.is_built(), reason="the native library is not built")
IMPLEMENTATIONS = ["reference", pytest.param("native", marks=needs_library)]
BIG = (64, 1 << 20)  # 256 MB of float32


def resident_bytes():
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) << 10


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8])
@pytest.mark.parametrize("shape", [(3,), (1, 5, 7), (1023, 1025), (5, 1 << 20)])
def test_zeros(implementation, shape, dtype):
    made = jax.jit(partial(zeros, shape, dtype, implementation=implementation))()
    assert made.shape == shape and made.dtype == dtype
    np.testing.assert_array_equal(made, np.zeros(shape, dtype))


@needs_library
def test_memory_that_held_something_is_zero():
    """Also where the allocator hands out what was written before."""
    make = jax.jit(partial(zeros, (3 << 20,), jnp.float32, implementation="native"))
    fill = jax.jit(lambda x: x + 1, donate_argnums=0)
    for _ in range(5):
        made = make()
        np.testing.assert_array_equal(made, 0)
        made = jax.block_until_ready(fill(made))
        np.testing.assert_array_equal(made, 1)
        made.delete()


@needs_library
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
def test_memory_is_taken_when_it_is_written():
    make = jax.jit(partial(zeros, BIG, jnp.float32, implementation="native"))
    write = jax.jit(lambda x: x.at[0].set(1), donate_argnums=0)
    before = resident_bytes()
    made = jax.block_until_ready(make())
    assert resident_bytes() - before < 32 << 20
    made = jax.block_until_ready(write(made))  # 4 MB
    assert resident_bytes() - before < 64 << 20
    assert float(made[0, -1]) == 1 and float(made[1, 0]) == 0


def test_the_native_one_is_for_one_cpu():
    names = [OP.preferred_at(place, (3,), jnp.float32) for place in (UNPLACED, Placement.default())]
    assert names == ["reference", "native" if native.is_built() else "reference"]
