"""Attention whose results depend on no other token, behind a window and through an engine's own view of its block
tables: that begins before the first key that the step reads, so that positions move with the chunks."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.engine.device.layer_caches import view_table
from jaxllm.engine.device.slot_rows import TableShape
from jaxllm.engine.schedule.cache_groups import CacheGroup
from jaxllm.pallas_kernels.dispatch import Placement
from jaxllm.pallas_kernels.paged_attention import PagedBatch, first_key_multiple, gpu_in_order, kv_shape, native, tpu

WINDOW = 70
ATTENTION = {
    "cpu": partial(native.ragged_paged_attention, batch_invariant=True),
    "gpu": partial(gpu_in_order.ragged_paged_attention, interpret=True),
    "tpu": partial(tpu.ragged_paged_attention, batch_invariant=True, interpret=True),
}


def attend(platform: str, dtype: str, block_size: int, multiple: int, chunks: list[int]) -> np.ndarray:
    """The bits of what a text's tokens attend to, in steps of so many tokens each."""
    draw, length = np.random.default_rng(0), sum(chunks)
    q, k, v = (jnp.asarray(draw.standard_normal((length, heads, 64)), dtype) for heads in (4, 2, 2))
    num_blocks = -(-length // block_size)
    pool = jnp.zeros(kv_shape(num_blocks, block_size, 2, 64, platform=platform), dtype)
    table = jnp.arange(num_blocks, dtype=jnp.int32)[None, None]
    shape, found = TableShape(CacheGroup(window=WINDOW), num_blocks, num_blocks), []
    op = jax.jit(partial(ATTENTION[platform], scale=0.125, sliding_window=WINDOW))
    for begin, size in zip(np.cumsum([0, *chunks[:-1]]), chunks, strict=True):
        past = int(begin) + size
        ints = [0, size], [past], [int(size == 1), 1]
        batch = PagedBatch(table[:, 0], *(jnp.asarray(x, jnp.int32) for x in ints))
        (batch,) = view_table(batch, table, shape, jnp.asarray([begin], jnp.int32), block_size, multiple)
        out, pool = op(*(x[int(begin) : past] for x in (q, k, v)), pool, batch)
        found.append(np.asarray(out.astype(jnp.float32)).view(np.int32))
    return np.concatenate(found)


@pytest.mark.parametrize(
    ("platform", "dtype", "block_size", "chunks"),
    [
        ("cpu", "bfloat16", 16, [90, 13, 13, 13, 1, 1, 1]),
        ("cpu", "float32", 8, [90, 13, 13, 13, 1, 1, 1]),
        ("gpu", "bfloat16", 32, [90, 13, 13, 13, 1]),  # blocks are smaller than the kernel's tiles of keys
        ("gpu", "float32", 16, [90, 13, 13, 13, 1]),
        pytest.param("tpu", "bfloat16", 32, [560, 13, 17, 1], marks=pytest.mark.slow),
        pytest.param("tpu", "float32", 16, [300, 260, 31], marks=pytest.mark.slow),
    ],
)
def test_chunks_behind_a_window(platform, dtype, block_size, chunks, monkeypatch):
    monkeypatch.setattr(Placement, "platform", platform)
    multiple = first_key_multiple(Placement(batch_invariant=True))
    whole = attend(platform, dtype, block_size, multiple, [sum(chunks)])
    np.testing.assert_array_equal(attend(platform, dtype, block_size, multiple, chunks), whole)
