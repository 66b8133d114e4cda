"""The TPU's attention kernel compiled for chips that are not there: it fits, and the pool stays where it is."""

from functools import partial

import jax.numpy as jnp
import pytest

from jaxllm.pallas_kernels.paged_attention import PagedBatch, kv_shape, tpu
from tests.compile_only.targets import chip_names, compile_on, mesh_of, with_seldom

NUM_BLOCKS = 1024
# Heads, KV heads, head_dim, sliding window: whole models, and a device's part of them.
MODELS = {
    "llama-3.1-8b": (32, 8, 128, None),
    "llama-3.1-8b tensor=4": (8, 2, 128, None),
    "llama-3.1-8b tensor=8": (4, 1, 128, None),
    "qwen3-0.6b": (16, 8, 128, None),
    "gemma-3-4b": (8, 4, 256, 1024),
    "gemma-3-4b tensor=4": (2, 1, 256, 1024),
}
ENCODERS = {"bge-base": (12, 12, 64, None), "modernbert": (12, 12, 64, 65), "embeddinggemma-300m": (3, 1, 256, 257)}
# Tokens, sequences, block size, blocks a sequence: decodes and mixed steps, up to 131072 tokens a sequence.
STEPS = {
    "decode 8": (8, 8, 16, 512),
    "decode 64": (64, 64, 32, 4096),
    "decode 256": (256, 256, 128, 1024),
    "mixed 512": (512, 64, 16, 2048),
    "mixed 2048": (2048, 256, 32, 4096),
}


def check(chip, model, step, dtype=jnp.bfloat16, pool_dtype=None, **options):
    (heads, kv_heads, head_dim, window), (tokens, seqs, block_size, blocks_per_seq) = model, step
    pool_dtype = jnp.dtype(pool_dtype or dtype)
    pool = kv_shape(NUM_BLOCKS, block_size, kv_heads, head_dim, platform="tpu")
    shapes = [((tokens, n, head_dim), dtype) for n in (heads, kv_heads, kv_heads)]
    shapes += [(pool, pool_dtype), ((seqs, blocks_per_seq), jnp.int32)]
    shapes += [((n,), jnp.int32) for n in (seqs + 1, seqs, 2)]
    extra = {"sinks": ((heads,), jnp.float32), "kv_scales": ((2, kv_heads), jnp.float32)}
    names = [name for name in extra if options.pop(name, False)]
    op = partial(tpu.ragged_paged_attention, scale=head_dim**-0.5, sliding_window=window, **options)
    compiled = compile_on(
        mesh_of(chip),
        lambda *args: op(*args[:4], PagedBatch(*args[4:8]), **dict(zip(names, args[8:], strict=True))),
        *shapes,
        *[extra[name] for name in names],
        donate_argnums=(3,),
    )
    memory, pool_bytes = compiled.memory_analysis(), pool_dtype.itemsize
    for n in pool:
        pool_bytes *= n
    assert memory.alias_size_in_bytes == pool_bytes
    shape = tpu.shapes_of(jnp.zeros(shapes[0][0], dtype), jnp.zeros((1, *pool[1:]), pool_dtype))
    operands = tokens * shape.token_bytes + 4 * seqs * max(blocks_per_seq, 128)  # but for the pool
    assert memory.temp_size_in_bytes <= 2 * operands
    assert "tpu_custom_call" in compiled.as_text()


BOTH = ("decode 64", "mixed 2048")


@pytest.mark.parametrize(("model", "step"), [(m, s) for m in MODELS for s in STEPS if s in BOTH or m == "llama-3.1-8b"])
@pytest.mark.parametrize("chip", chip_names("tpu"))
def test_models(chip, model, step):
    check(chip, MODELS[model], STEPS[step])


@pytest.mark.parametrize("model", ENCODERS)
@pytest.mark.parametrize("chip", chip_names("tpu"))
def test_bidirectional(chip, model):
    check(chip, ENCODERS[model], STEPS["mixed 2048"], causal=False)


@pytest.mark.parametrize("pool_dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("step", BOTH)
@pytest.mark.parametrize("chip", chip_names("tpu"))
def test_quantised_pools(chip, step, pool_dtype):
    check(chip, MODELS["llama-3.1-8b"], STEPS[step], pool_dtype=pool_dtype, kv_scales=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("heads", with_seldom([(14, 2, 64), (32, 1, 80), (3, 3, 64)], [(40, 10, 96), (32, 32, 128)]))
@pytest.mark.parametrize("chip", chip_names("tpu"))
def test_other_heads(chip, heads, dtype):
    """With all options: sinks as in gpt-oss, a cap as in Gemma 2."""
    check(chip, (*heads, 128), STEPS["mixed 512"], dtype=dtype, sinks=True, soft_cap=30.0)


@pytest.mark.parametrize("block_size", [16, 64, 256])
@pytest.mark.parametrize("chip", chip_names("tpu"))
def test_block_sizes(chip, block_size):
    check(chip, MODELS["llama-3.1-8b"], (256, 256, block_size, 131072 // block_size))
