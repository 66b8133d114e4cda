"""The pool is sized from shapes, and what does not fit is refused with the figures."""

import math
import re
import subprocess
import sys
from dataclasses import replace

import jax.numpy as jnp
import pytest
from flax import nnx

from jaxllm import LLM
from jaxllm.engine.config import EngineConfig
from jaxllm.engine.device import memory
from jaxllm.engine.device.device_memory import DeviceMemory
from jaxllm.engine.device.model_shape import model_shape
from jaxllm.engine.failure import describe_state
from jaxllm.errors import OutOfMemoryError
from jaxllm.models import gemma3, llama, transformer
from jaxllm.models.layers import LayerSpec, Rope
from jaxllm.sharding.mesh import make_mesh
from tests.tiny import greedy, ids, make_llm

LLAMA_8B = llama.Config(
    vocab=128256,
    embed=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    mlp=14336,
    layers=(LayerSpec(rope=Rope(theta=5e5)),) * 32,
    max_len=131072,
    dtype=jnp.bfloat16,
)
CONFIG = EngineConfig(
    max_model_len=131072, max_num_seqs=256, max_num_batched_tokens=2048, block_size=32, num_blocks=2**30
)
H200 = DeviceMemory(139 << 30, 139 << 30, 0)


def host(free: int, total: int = 160 << 30, **others) -> DeviceMemory:
    return DeviceMemory(total, total, total - free, is_host=True, **others)


def blocks_of(device, mesh, config=CONFIG):
    shape = shape_of(mesh)
    return memory.num_blocks(shape, config, memory.kv_budget(shape, config, mesh, device), mesh)


def shape_of(mesh):
    return model_shape(LLAMA_8B, *nnx.split(transformer.abstract(llama.Model, LLAMA_8B)), mesh)


def test_an_8b_model_on_one_and_on_four_devices():
    one, four = make_mesh(None), make_mesh("tensor=4")
    assert memory.block_bytes(shape_of(one), CONFIG, one) == 32 * (
        131072 + 4
    )  # bytes a token: 2 x 32 layers x 8 x 128 x 2, and its id
    assert memory.leaf_bytes(shape_of(one).leaves) == pytest.approx(16.06e9, rel=0.001)
    assert memory.leaf_bytes(shape_of(four).leaves) == pytest.approx(16.06e9 / 4, rel=0.001)
    blocks = blocks_of(H200, one)
    used = blocks * 32 * 131072 + memory.leaf_bytes(shape_of(one).leaves)
    assert 0.85 * H200.total < used < 0.92 * H200.total  # the rest: the step, the share kept free, the grid
    assert blocks_of(H200, four) > 4 * blocks
    half = replace(CONFIG, gpu_memory_utilization=0.5)
    used = blocks_of(H200, one, half) * 32 * 131072 + memory.leaf_bytes(shape_of(one).leaves)
    assert 0.44 * H200.total < used < 0.5 * H200.total


def test_on_a_cpu_the_pool_takes_a_small_share_whatever_that_of_accelerators(caplog):
    mesh = make_mesh(None)
    for share in (None, 0.5, 0.9):
        config = replace(CONFIG, gpu_memory_utilization=share)
        assert memory.kv_budget(shape_of(mesh), config, mesh, host(100 << 30)) == 10 << 30
    little = host(20 << 30)
    loaded, given = (
        memory.kv_budget(shape_of(mesh), CONFIG, mesh, little, has_params=given) for given in (False, True)
    )
    assert (1 << 30) < loaded < (5 << 30) and given == 10 << 30
    assert "not 11: no more of the machine's memory is free beside the model" in caplog.text
    claimed = memory.kv_budget(shape_of(mesh), CONFIG, mesh, little._replace(claimed=1 << 30))
    assert claimed == loaded - (1 << 30)
    for share in (0.0, 1.1):
        with pytest.raises(ValueError, match=f"gpu_memory_utilization={share} must be a finite number in"):
            replace(CONFIG, gpu_memory_utilization=share)


def test_on_a_cpu_what_not_even_swap_space_holds_is_refused():
    mesh = make_mesh(None)
    block = memory.block_bytes(shape_of(mesh), CONFIG, mesh)
    assert memory.kv_budget(shape_of(mesh), CONFIG, mesh, host(1 << 30, swap=100 << 30)) == block
    message = r"16\.06 GB for parameters that are still to load.* 3\.22 GB are free, with 1\.07 GB taken off that other"
    with pytest.raises(OutOfMemoryError, match=message):
        memory.kv_budget(shape_of(mesh), CONFIG, mesh, host(4 << 30, claimed=1 << 30))


def test_a_model_that_does_not_fit_says_how_much_is_missing():
    with pytest.raises(OutOfMemoryError, match=r"16\.06 GB for parameters.* GB more than it may use; take more"):
        blocks_of(DeviceMemory(16 << 30, 16 << 30, 0), make_mesh(None))


def test_what_others_use_is_left_to_them_and_parameters_count_once():
    mesh, params = make_mesh(None), memory.leaf_bytes(shape_of(make_mesh(None)).leaves)

    def budget(in_use, **options):
        return memory.kv_budget(shape_of(mesh), CONFIG, mesh, H200._replace(in_use=in_use), **options)

    assert budget(0) - budget(10 << 30) == 10 << 30
    assert budget(params, has_params=True) == budget(0)
    assert budget(0) - budget(params + (10 << 30), has_params=True) == 10 << 30
    assert budget(1) == budget(50 << 20) == budget(64 << 20)  # small arrays don't move the number of blocks
    claimed = memory.kv_budget(shape_of(mesh), CONFIG, mesh, H200._replace(in_use=6 << 30, claimed=4 << 30))
    assert claimed == budget(10 << 30), "what another engine will take is as good as taken"
    trained = budget(2 * params, has_params=True)  # the trainer's copy is another one
    assert params <= budget(0) - trained <= params + (64 << 20)


def test_a_context_that_does_not_fit_is_refused_if_asked_for_and_shortened_if_not(tiny, monkeypatch, caplog):
    block = 8 * math.prod((2, 2, 16, 4)) * tiny.cfg.num_layers + 8 * 4  # block_size 8, 2 KV heads, float32; ids
    monkeypatch.setattr(memory, "kv_budget", lambda *_, **__: 6 * block)
    sizes = dict(max_num_seqs=1, max_num_batched_tokens=1, block_size=8)
    with pytest.raises(OutOfMemoryError, match="max_model_len=96 tokens need .* GB more .* holds 48 tokens"):
        LLM(tiny.model, max_model_len=96, **sizes)
    with LLM(tiny.model, **sizes) as llm:
        assert llm.engine.config.max_model_len == 48 and llm.stats().num_blocks == 6
    assert "max_model_len is 48 tokens, not the model's 96: the KV pool has 6 blocks of 8 tokens" in caplog.text


def test_a_pool_that_is_given_must_hold_one_sequence(tiny):
    with pytest.raises(ValueError, match="max_model_len=96 tokens don't fit the KV pool of 4 blocks of 8 = 32 tokens"):
        LLM(tiny.model, num_blocks=4, block_size=8, max_model_len=96)
    with LLM(tiny.model, num_blocks=4, block_size=8, max_num_seqs=1, max_num_batched_tokens=1) as llm:
        assert llm.engine.config.max_model_len == 32


def test_a_share_of_accelerators_on_a_cpu_is_said_once(tiny, caplog):
    with LLM(tiny.model, gpu_memory_utilization=0.9, max_num_seqs=1, max_num_batched_tokens=1) as llm:
        assert llm.stats().num_blocks == 3
    (said,) = [text for text in caplog.messages if "gpu_memory_utilization" in text]
    assert "on a CPU the KV pool takes 6.25 % of the machine's memory at most, unless num_blocks" in said


def test_a_pool_beyond_the_memory_is_refused_before_it_is_built():
    """In a process of its own, whose memory at most is told."""
    code = """
import resource
from jaxllm import LLM
from jaxllm.errors import OutOfMemoryError
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    LLM(num_blocks=10**9)
except OutOfMemoryError as error:
    print(error)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    message, grown = done.stdout.splitlines()
    assert re.fullmatch(
        r"num_blocks=1000000000 take \d+\.\d GB of each device, 0\.\d+ MB each, but of \d+\.\d GB that are free the "
        r"parameters take 0\.0: give at most \d+, or leave num_blocks out for as many as fit",
        message,
    )
    assert int(grown) < 200_000  # kB: the tokenizer and the like


def test_blocks_are_counted_against_what_is_free():
    mesh, shape = make_mesh(None), shape_of(make_mesh(None))
    device = host(33 << 30, claimed=1 << 30)
    params, each = memory.leaf_bytes(shape.leaves), memory.block_bytes(shape, CONFIG, mesh)
    most = ((32 << 30) - params) // each
    memory.check_num_blocks(shape, CONFIG, most, mesh, device)
    memory.check_num_blocks(shape, CONFIG, (32 << 30) // each, mesh, device, has_params=True)
    with pytest.raises(OutOfMemoryError, match=rf"of 34.4 GB .* 16.1: give at most {memory.coarse(most)},"):
        memory.check_num_blocks(shape, CONFIG, most + 1, mesh, device)


def test_swap_space_beyond_the_machines_memory_is_refused(tiny):
    with pytest.raises(ValueError, match=r"swap_space=10000 GiB is more than the machine's memory, \d+\.\d GiB"):
        LLM(tiny.model, swap_space=10000.0)


def test_a_step_has_room_for_each_sequence(tiny):
    with pytest.raises(
        ValueError, match="max_num_batched_tokens=4 is less than max_num_seqs=32, but a step has a token"
    ):
        LLM(tiny.model, max_num_seqs=32, max_num_batched_tokens=4)


def test_what_to_lower_when_the_state_does_not_fit():
    error = RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 32768000000 bytes.")
    assert describe_state(error, CONFIG) == (
        "RESOURCE_EXHAUSTED: Out of memory allocating 32768000000 bytes. Lower num_blocks (1073741824), max_num_seqs "
        "(256) or max_num_batched_tokens (2048), or free memory of the device"
    )
    assert describe_state(RuntimeError(), CONFIG) == "RuntimeError"


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
        assert 0 < largest <= llm.engine.runner.executor.temp_bound
        llm.generate(ids([1]), greedy(1))


def test_block_numbers_lie_on_a_coarse_grid():
    assert [memory.coarse(n) for n in (1, 31, 33, 1000, 4095, 100_000)] == [1, 31, 32, 992, 3968, 98304]
    assert replace(CONFIG, num_blocks=4096).blocks_per_seq == 4096


@pytest.mark.parametrize(("max_model_len", "max_num_seqs"), [(2100, 1), (3000, 1), (2100, 3), (131072, 1)])
def test_rounding_takes_nothing_from_what_fits(max_model_len, max_num_seqs):
    config = replace(CONFIG, max_model_len=max_model_len, max_num_seqs=max_num_seqs)
    assert blocks_of(H200, make_mesh(None), config) == max_num_seqs * config.blocks_per_seq


def test_rounding_leaves_a_sequence_that_fits_and_stays_within_memory(tiny):
    mesh = make_mesh(None)
    shape = model_shape(tiny.cfg, *nnx.split(tiny.model), mesh)
    config = replace(CONFIG, max_model_len=1000, max_num_seqs=4, block_size=10)  # 100 blocks a sequence
    block = memory.block_bytes(shape, config, mesh)
    found = {fit: memory.num_blocks(shape, config, fit * block + block // 2, mesh) for fit in (50, 99, 101, 399, 400)}
    assert found == {50: 50, 99: 96, 101: 100, 399: 384, 400: 400}


def test_a_context_that_fits_is_served_whole(tiny):
    sizes = dict(max_num_seqs=1, max_num_batched_tokens=1, block_size=1)
    with LLM(tiny.model, **sizes) as llm:  # 96 blocks
        assert llm.engine.config.max_model_len == 96
    with LLM(tiny.model, max_model_len=67, **sizes) as llm:
        assert llm.engine.config.num_blocks == 67


def gemma3_4b() -> gemma3.Config:
    """Of the published config.json: five layers with a window, then one without, of 34."""
    hf = dict(
        vocab_size=262208,
        hidden_size=2560,
        num_hidden_layers=34,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        intermediate_size=10240,
        max_position_embeddings=131072,
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        query_pre_attn_scalar=256,
        rms_norm_eps=1e-6,
        hidden_activation="gelu_pytorch_tanh",
        sliding_window=1024,
        sliding_window_pattern=6,
        dtype=jnp.bfloat16,
    )
    dtype = hf.pop("dtype")
    return gemma3.Config.from_hf(hf, dtype=dtype)


def sequences_that_fit(config, num_pages, num_tokens) -> int:
    """How many sequences of so many tokens a pool of pages holds at once, beside a step's chunk of one of them."""
    num_blocks = -(-num_tokens // config.block_size)
    held = config.count_pages(num_blocks)
    chunk = config.count_pages(num_blocks, config.max_num_batched_tokens) - held
    return (num_pages - chunk) // held


def test_windows_leave_room_for_four_times_as_many_long_sequences():
    """Gemma 3 4B's pool, in bytes that are the same for both, and never fewer sequences of any length."""
    mesh, cfg = make_mesh(None), gemma3_4b()
    shape = model_shape(cfg, *nnx.split(transformer.abstract(gemma3.Model, cfg)), mesh)
    everything = replace(
        shape, caches=tuple(tuple(replace(spec, window=None) for spec in of_layer) for of_layer in shape.caches)
    )
    wanted, before = (replace(CONFIG, groups=each.cache_layout(CONFIG, mesh).groups) for each in (shape, everything))
    assert [tuple(group) for group in wanted.groups] == [(None, 5, False), (1024, 29, False)]
    found = {}
    for num_tokens in (512, 2048, 8192, 32768, 131072):
        pages = [(60 << 30) // each.cache_layout(CONFIG, mesh).page_bytes(mesh) for each in (everything, shape)]
        pairs = zip((before, wanted), pages, strict=True)
        found[num_tokens] = [sequences_that_fit(config, num_pages, num_tokens) for config, num_pages in pairs]
    assert all(after >= former for former, after in found.values()), found
    assert found[32768][1] >= 4 * found[32768][0], found
