"""The pool is sized from shapes, and what does not fit is refused with the figures."""

import math
from dataclasses import replace

import jax.numpy as jnp
import pytest
from flax import nnx

from jaxllm import LLM
from jaxllm.engine.build import model_shape
from jaxllm.engine.config import EngineConfig
from jaxllm.engine.device import memory
from jaxllm.errors import OutOfMemoryError
from jaxllm.models import llama, transformer
from jaxllm.models.layers import Rope
from jaxllm.sharding.mesh import make_mesh
from tests.tiny import greedy, ids, make_llm

LLAMA_8B = llama.Config(
    vocab=128256,
    embed=4096,
    num_layers=32,
    heads=32,
    kv_heads=8,
    head_dim=128,
    mlp=14336,
    rope=Rope(theta=5e5),
    max_len=131072,
    dtype=jnp.bfloat16,
)
CONFIG = EngineConfig(
    max_model_len=131072, max_num_seqs=256, max_num_batched_tokens=2048, block_size=32, num_blocks=2**30
)
H200 = 139 << 30


def shape_of(mesh):
    return model_shape(LLAMA_8B, *nnx.split(transformer.abstract(llama.Model, LLAMA_8B)), mesh)


def test_an_8b_model_on_one_and_on_four_devices(monkeypatch):
    monkeypatch.setattr(memory, "device_bytes", lambda mesh: H200)
    one, four = make_mesh(None), make_mesh("tensor=4")
    assert memory.block_bytes(shape_of(one), 32, one) == 32 * 131072  # bytes a token: 2 x 32 layers x 8 x 128 x 2
    assert memory.leaf_bytes(shape_of(one).leaves) == pytest.approx(16.06e9, rel=0.001)
    assert memory.leaf_bytes(shape_of(four).leaves) == pytest.approx(16.06e9 / 4, rel=0.001)
    blocks = memory.num_blocks(shape_of(one), CONFIG, one)
    used = blocks * 32 * 131072 + memory.leaf_bytes(shape_of(one).leaves)
    assert 0.85 * H200 < used < 0.92 * H200  # the rest: the step, the share kept free, the grid
    assert memory.num_blocks(shape_of(four), CONFIG, four) > 4 * blocks
    half = replace(CONFIG, gpu_memory_utilization=0.5)
    used = memory.num_blocks(shape_of(one), half, one) * 32 * 131072 + memory.leaf_bytes(shape_of(one).leaves)
    assert 0.44 * H200 < used < 0.5 * H200


def test_on_a_cpu_the_pool_takes_a_small_share_unless_told(monkeypatch):
    mesh = make_mesh(None)
    monkeypatch.setattr(memory, "machine_bytes", lambda: 160 << 30)
    assert memory.kv_budget(shape_of(mesh), CONFIG, mesh) == 10 << 30
    told = memory.kv_budget(shape_of(mesh), replace(CONFIG, gpu_memory_utilization=0.5), mesh)
    assert (50 << 30) < told < (65 << 30)
    for share in (0.0, 1.1):
        with pytest.raises(ValueError, match=f"gpu_memory_utilization={share} must be a finite number in"):
            replace(CONFIG, gpu_memory_utilization=share)


def test_a_model_that_does_not_fit_says_how_much_is_missing(monkeypatch):
    mesh = make_mesh(None)
    monkeypatch.setattr(memory, "device_bytes", lambda mesh: 16 << 30)
    with pytest.raises(OutOfMemoryError, match=r"16\.06 GB for parameters.* GB more than it may use; take more"):
        memory.num_blocks(shape_of(mesh), CONFIG, mesh)


def test_a_context_that_does_not_fit_is_refused_if_asked_for_and_shortened_if_not(tiny, monkeypatch):
    block = 8 * math.prod((2, 2, 16, 4)) * tiny.cfg.num_layers  # block_size 8, 2 KV heads, float32
    monkeypatch.setattr(memory, "kv_budget", lambda *_: 6 * block)
    sizes = dict(max_num_seqs=1, max_num_batched_tokens=1, block_size=8)
    with pytest.raises(OutOfMemoryError, match="max_model_len=96 tokens need .* GB more .* holds 48 tokens"):
        LLM(tiny.model, max_model_len=96, **sizes)
    with LLM(tiny.model, **sizes) as llm:
        assert llm.engine.config.max_model_len == 48 and llm.stats().num_blocks == 6


def test_a_pool_that_is_given_must_hold_one_sequence(tiny):
    with pytest.raises(ValueError, match="max_model_len=96 tokens don't fit the KV pool of 4 blocks of 8 = 32 tokens"):
        LLM(tiny.model, num_blocks=4, block_size=8, max_model_len=96)
    with LLM(tiny.model, num_blocks=4, block_size=8, max_num_seqs=1, max_num_batched_tokens=1) as llm:
        assert llm.engine.config.max_model_len == 32


@pytest.mark.parametrize(
    "field", ["max_num_seqs", "block_size", "max_num_batched_tokens", "num_blocks", "max_model_len"]
)
def test_sizes_are_checked_by_name(tiny, field):
    for value in (-3, 0):
        with pytest.raises(ValueError, match=f"{field}={value} must be an integer"):
            LLM(tiny.model, **{field: value})


def test_the_bound_covers_what_the_compiler_says(tiny):
    with make_llm(tiny.model, max_num_seqs=4, max_num_batched_tokens=64) as llm:
        largest = llm.engine.runner.compile_plan["step", 64].memory_analysis().temp_size_in_bytes
        assert 0 < largest <= llm.engine.runner._temp_bound
        llm.generate(ids([1]), greedy(1))


def test_block_numbers_lie_on_a_coarse_grid():
    assert [memory.coarse(n) for n in (1, 31, 33, 1000, 4095, 100_000)] == [1, 31, 32, 992, 3968, 98304]
    assert replace(CONFIG, num_blocks=4096).blocks_per_seq == 4096
