"""Copies of blocks within a pool, by every implementation, against numpy."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.pallas_kernels import native
from jaxllm.pallas_kernels.copy_blocks.api import OP, copy_blocks

NUM_BLOCKS, NUM_MOVES = 9, 6


@pytest.fixture(scope="module", params=sorted(OP.implementations))
def compiled(request):
    """dtype -> the op, for pools whose blocks take more than a part of the work, and an odd number of bytes."""
    if request.param == "native" and not native.is_built():
        pytest.skip("not built: python -m jaxllm.pallas_kernels.native.build")
    op = jax.jit(partial(copy_blocks, implementation=request.param), donate_argnums=0)
    pools = {dtype: jax.ShapeDtypeStruct((NUM_BLOCKS, 2, 3, 2999), dtype) for dtype in (jnp.float32, jnp.bfloat16)}
    moves = jax.ShapeDtypeStruct((2, NUM_MOVES), jnp.int32)
    return {dtype: (pool, op.lower(pool, moves).compile()) for dtype, pool in pools.items()}


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_all_blocks_are_read_before_one_is_written(compiled, data):
    """Targets may be sources of other copies, several copies have one source, and padding does nothing."""
    dtype = data.draw(st.sampled_from(sorted(compiled, key=str)), label="dtype")
    targets = data.draw(st.lists(st.integers(0, NUM_BLOCKS - 1), unique=True, max_size=NUM_MOVES), label="targets")
    sources = [data.draw(st.integers(0, NUM_BLOCKS - 1), label="source") for _ in targets]
    moves = NUM_BLOCKS + np.tile(np.arange(NUM_MOVES, dtype=np.int32), (2, 1))
    moves[:, : len(targets)] = sources, targets
    shape, run = compiled[dtype]
    before = np.random.default_rng(0).normal(size=shape.shape).astype(dtype)
    want = before.copy()
    want[targets] = before[sources]
    np.testing.assert_array_equal(np.asarray(run(jnp.asarray(before), moves)), want)


def test_the_pool_is_not_copied(compiled):
    shape, run = compiled[jnp.float32]  # JAX 0.10.2 scatters bfloat16 by way of float32 on a CPU
    analysis = run.memory_analysis()
    block = shape.size // NUM_BLOCKS * shape.dtype.itemsize
    assert analysis.alias_size_in_bytes == NUM_BLOCKS * block
    assert analysis.temp_size_in_bytes <= 2 * NUM_MOVES * block + 4096


def test_a_pool_of_several_devices_is_xla_s():
    shapes = jax.ShapeDtypeStruct((NUM_BLOCKS, 4), jnp.float32), jax.ShapeDtypeStruct((2, NUM_MOVES), jnp.int32)
    assert "custom_call" not in jax.jit(copy_blocks).lower(*shapes).as_text()
