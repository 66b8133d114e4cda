"""Tiles of experts' rows: that each row has one, and how little they read and compute in vain."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.pallas_kernels.grouped_matmul import gpu, tpu
from jaxllm.pallas_kernels.grouped_matmul.tiles import LEAST, most_tiles, sizes_of, tiles_of

EXPERTS, TOP_K, EMBED, MLP = 128, 8, 2048, 768  # of Qwen3-30B-A3B


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 150), min_size=5, max_size=5),
    before=st.integers(0, 9),
    after=st.integers(0, 9),
    largest=st.sampled_from([8, 16, 128]),
    chunk=st.sampled_from([None, 16, 128]),
)
def test_every_row_has_a_tile(lengths, before, after, largest, chunk):
    num_rows = 800
    offsets = np.minimum(before + np.cumsum([0, *lengths]), num_rows - after)
    sizes = tuple(size for size in (largest, largest // 2, largest // 4, largest // 8) if size >= LEAST)
    find = jax.jit(partial(tiles_of, sizes=sizes, chunk=chunk), static_argnums=1)
    *parts, count = map(np.asarray, find(jnp.asarray(offsets, jnp.int32), num_rows))
    live = list(zip(*(part[:count].tolist() for part in parts), strict=True))
    assert count <= most_tiles(num_rows, 5 + (0 if chunk is None else num_rows // chunk), sizes)
    assert (parts[3][count:] == 0).all() and set(parts[3][:count]) <= set(sizes)
    rows = [row for _, first, end, _ in live for row in range(first, end)]
    assert rows == list(range(offsets[0], offsets[-1]))
    for expert, first, end, size in live:
        assert offsets[expert] <= first < end <= min(offsets[expert + 1], first + size)
        assert chunk is None or first // chunk == (end - 1) // chunk


def routed(tokens: int, seed: int) -> jax.Array:
    """Offsets of the rows of tokens that choose experts at random."""
    rng = np.random.default_rng(seed)
    chosen = np.concatenate([rng.permutation(EXPERTS)[:TOP_K] for _ in range(tokens)])
    return jnp.asarray(np.cumsum([0, *np.bincount(chosen, minlength=EXPERTS)]), jnp.int32)


def tiles_of_kernel(module, offsets):
    """As the kernel for a weight of [experts, EMBED, 2, MLP] has them, in numpy, and its plan."""
    rows = int(offsets[-1])
    x = jax.ShapeDtypeStruct((rows + -rows % 16, EMBED), jnp.bfloat16)
    weight = jax.ShapeDtypeStruct((EXPERTS, EMBED, 2, MLP), jnp.bfloat16)
    if module is gpu:
        x, weight = jax.eval_shape(partial(gpu.flatten, num_inputs=1), x, weight)
    spec = module.plan(x, weight)
    tiles = tiles_of(offsets, len(x), sizes=spec.sizes, chunk=getattr(spec, "chunk", None))
    return jax.tree.map(np.asarray, tiles)


@pytest.mark.parametrize("module", [gpu, tpu])
@pytest.mark.parametrize("tokens", [1, 8])
def test_a_decode_reads_the_weights_of_touched_experts_once(module, tokens):
    """The index maps fetch a weight when a tile's expert is another than that of the tile before."""
    for seed in range(5):
        offsets = routed(tokens, seed)
        tiles = tiles_of_kernel(module, offsets)
        experts = tiles.expert[: tiles.count]
        fetched = 1 + np.count_nonzero(np.diff(experts))
        touched = np.count_nonzero(np.diff(offsets))
        weight, rows = EMBED * 2 * MLP * 2, tokens * TOP_K * (EMBED + 2 * MLP) * 2
        metadata = 4 * 4 * len(tiles.expert)
        padding = 16 * (EMBED + 2 * MLP) * 2  # of windows of rows
        assert (fetched * weight + rows + metadata + padding) / (touched * weight + rows) < 1.15


@pytest.mark.parametrize("module", [gpu, tpu])
def test_a_prompt_computes_little_in_vain(module):
    for seed in range(5):
        tiles = tiles_of_kernel(module, routed(512, seed))
        assert 1 <= tiles.size.sum() / (512 * TOP_K) < 1.2
        assert 1 + np.count_nonzero(np.diff(tiles.expert[: tiles.count])) == EXPERTS


def test_few_rows_have_small_tiles():
    assert sizes_of(8, 128) == (16, 8)
    assert sizes_of(4096, 128) == (32, 16, 8)
    assert sizes_of(65536, 8) == (128, 64, 32, 16)
