"""Whole steps of well-known shapes, compiled for chips that are not there, as the engine would compile them.

One decode step and one mixed step of each: they fit, the pool stays where it is, and the attention kernel runs. What is
checked holds layer by layer, so that models have their first few layers; JAXLLM_WHOLE=1 compiles all.
"""

import math
import re
from functools import cache
from typing import Any

import pytest

from jaxllm.aot import efficiency, hlo, traffic
from jaxllm.aot.chips import parse_target
from jaxllm.aot.prepare import Prepared, prepare
from jaxllm.aot.report import Executable, compile_one
from jaxllm.engine.device import memory
from tests.compile_only.targets import (
    MIXTURE_CONFIG,
    WHOLE,
    chip_names,
    compile_structure,
    prepare_config,
    prepare_few_layers,
    with_seldom,
)

FEW_LAYERS = {"llama-3.1-8b": 4, "qwen3-0.6b": 4, "gemma-3-4b": 6}  # of both kinds
MODELS = with_seldom(["qwen3-0.6b", "gemma-3-4b"], ["llama-3.1-8b"])
DEVICES = {("v5e", "llama-3.1-8b"): 4}  # others fit one
MIXTURE = "mixture"
DECODE, MIXED = 64, 2048  # tokens
CONTEXT = 1024  # tokens of each sequence that is decoded
STEPS = with_seldom(
    [(model, tokens) for model in ("qwen3-0.6b", "gemma-3-4b") for tokens in (DECODE, MIXED)],
    [("llama-3.1-8b", DECODE), ("llama-3.1-8b", MIXED)],
)

pytestmark = pytest.mark.timeout(1800)


@cache  # by every argument, so that each step compiles once; `count` 0 is as many devices as it needs
def prepared(chip: str, model: str, count: int, **options: Any) -> Prepared:
    target = parse_target(f"{chip}-{count or DEVICES.get((chip, model), 1)}")
    options |= {"max_model_len": 8192, "max_num_seqs": DECODE, "max_num_batched_tokens": MIXED}
    if model == MIXTURE:
        return prepare_config(MIXTURE_CONFIG, target, **options)
    if WHOLE:
        return prepare(model, target, **options)
    return prepare_few_layers(model, FEW_LAYERS[model], target, **options)


@cache
def compiled(chip: str, model: str, tokens: int, count: int, kind: str = "step", **options: Any) -> Executable:
    return compile_structure(prepared(chip, model, count, **options), (kind, tokens))


def counted(chip: str, model: str, tokens: int, count: int, **options: Any) -> traffic.Traffic:
    module = hlo.parse(compiled(chip, model, tokens, count, **options).text)
    return traffic.count(module, lambda p: "pool" if p.op_name.startswith("kv_pools[") else "rest")


def pool_arrays(plan: Prepared) -> set[tuple[int, ...]]:
    """Dimensions of a device's part of a layer's pool."""
    return {pool.sharding.shard_shape(pool.shape) for pool in plan.lowering.state().kv_pools}


def check(chip: str, model: str, tokens: int, count: int = 0, **options: Any) -> None:
    plan = prepared(chip, model, count, **options)
    step = compiled(chip, model, tokens, count, **options)
    pool = memory.leaf_bytes(plan.lowering.state().kv_pools)
    assert step.peak_bytes < plan.target.chip.usable_bytes
    assert step.alias_bytes >= pool
    assert step.temp_bytes <= memory.step_bytes(plan.shape, plan.config, plan.mesh)  # which the pool left room for
    assert step.temp_bytes < pool / 4
    moving = ("copy", "copy-start", "transpose", "convert")
    module = hlo.parse(step.text)
    for computation in module.computations.values():
        for op in computation.instructions.values():
            copied = op.opcode in moving and any(a.dims in pool_arrays(plan) for a in hlo.arrays(op.shape))
            assert not copied, f"{op.name} copies a pool"
    moved = counted(chip, model, tokens, count, **options)
    assert moved.pallas_calls >= plan.cfg.num_layers
    assert moved.num_bytes["pool"] == 0, "something but the attention kernel touches the pool"


@pytest.mark.parametrize(("model", "tokens"), STEPS)
@pytest.mark.parametrize("chip", chip_names())
def test_steps(chip, model, tokens):
    check(chip, model, tokens)


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
@pytest.mark.parametrize("chip", chip_names())
def test_steps_with_keys_and_values_in_eight_bits(chip, kv_cache_dtype):
    """Half the bytes a token, and no array between 2 and 4 GiB on a GPU."""
    if (chip, kv_cache_dtype) == ("a100", "fp8"):
        with pytest.raises(ValueError, match="needs a GPU of compute capability 8.9 or more.* give 'int8'"):
            prepared(chip, "qwen3-0.6b", 0, kv_cache_dtype=kv_cache_dtype)
        return
    check(chip, "qwen3-0.6b", DECODE, kv_cache_dtype=kv_cache_dtype)
    plan, plain = prepared(chip, "qwen3-0.6b", 0, kv_cache_dtype=kv_cache_dtype), prepared(chip, "qwen3-0.6b", 0)
    (pool, *_), (wide, *_) = (each.lowering.state().kv_pools for each in (plan, plain))
    assert (pool.dtype.itemsize, wide.dtype.itemsize) == (1, 2) and pool.shape[1:] == wide.shape[1:]
    bytes_of = pool.size
    assert plan.target.chip.platform == "tpu" or bytes_of <= 2**31 or bytes_of > 2**32
    assert efficiency.fewest_bytes(plan, 1, CONTEXT)[1] * 2 == efficiency.fewest_bytes(plain, 1, CONTEXT)[1]
    if kv_cache_dtype == "int8":
        measuring = compile_structure(plan, "measure_kv_scales")
        assert measuring.temp_bytes <= memory.step_bytes(plan.shape, plan.config, plan.mesh)
    kind = "s8" if kv_cache_dtype == "int8" else "f8e4m3fn"
    assert kind in compiled(chip, "qwen3-0.6b", DECODE, 0, kv_cache_dtype=kv_cache_dtype).text


@pytest.mark.parametrize("chip", chip_names())
def test_a_step_on_two_devices(chip):
    check(chip, "qwen3-0.6b", DECODE, count=2)


@pytest.mark.parametrize("tokens", [DECODE, MIXED])
@pytest.mark.parametrize("chip", chip_names())
def test_a_step_of_a_mixture_of_experts(chip, tokens):
    """Two grouped products a layer are kernels, and nothing makes an array of the size of a weight."""
    check(chip, MIXTURE, tokens)
    text = compiled(chip, MIXTURE, tokens, 0).text
    layers, weight = MIXTURE_CONFIG["num_hidden_layers"], 128 * 768 * 2048
    kernels = re.findall(r"custom-call\([^\n]*op_name=\"[^\"]*jaxllm_grouped_matmul", text)
    assert len(kernels) == 2 * layers
    pools = pool_arrays(prepared(chip, MIXTURE, 0))
    for computation in hlo.parse(text).computations.values():
        for op in computation.instructions.values():
            if op.opcode not in ("parameter", "bitcast", "get-tuple-element", "tuple"):
                sizes = {math.prod(a.dims) for a in hlo.arrays(op.shape) if a.dims not in pools}
                assert not sizes & {weight, 2 * weight}, op.name


@pytest.mark.parametrize("chip", chip_names())
def test_devices_with_experts_of_their_own_sum_twice_a_layer(chip):
    """After attention, whose heads they share, and after the experts; and once for the table of embeddings."""
    mesh = "expert=8"
    plan, step = prepared(chip, MIXTURE, 8, mesh=mesh), compiled(chip, MIXTURE, DECODE, 8, mesh=mesh)
    layers = MIXTURE_CONFIG["num_hidden_layers"]
    assert len(re.findall(r" all-reduce(?:-start)?\(", step.text)) == 2 * layers + 1
    assert not re.findall(r" (?:all-gather|all-to-all|reduce-scatter|collective-permute)(?:-start)?\(", step.text)
    (experts,) = {leaf.sharding.shard_shape(leaf.shape)[0] for name, leaf in plan.tensors() if "gate_up" in name}
    assert experts == 128 // 8


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("chip", chip_names())
def test_layers_are_lowered_once_and_compiled_one_by_one(chip, model):
    """Kernels are lowered for each kind of layer, and run in each layer; a loop over layers could not fetch a layer's
    weights while the one before works."""
    plan, run = prepared(chip, model, 0), counted(chip, model, DECODE, 0).pallas_calls
    text = plan.lower(plan.jobs()["step", DECODE]).as_text()  # again: the first time imports Pallas, and traces twice
    lowered = sum(text.count(f"@{target}(") for target in traffic.PALLAS_TARGETS)
    num_kinds = len({layer.window for layer in plan.cfg.layers})
    assert lowered >= num_kinds
    assert lowered * plan.cfg.num_layers == run * num_kinds
    assert "while(" not in compiled(chip, model, DECODE, 0).text


@pytest.mark.parametrize("chip", chip_names("tpu"))
def test_the_smallest_step_takes_the_fewest_cycles(chip):
    """As the compiler estimates them: of one row it makes sums of products without the matrix unit."""
    plan = prepared(chip, "qwen3-0.6b", 0)
    texts = [compiled(chip, "qwen3-0.6b", tokens, 0).text for tokens in (min(plan.layouts), DECODE)]
    small, large = (sum(map(int, re.findall(r'"estimated_cycles":"(\d+)"', text))) for text in texts)
    assert 0 < small <= large


@pytest.mark.parametrize(("model", "tokens"), STEPS)
@pytest.mark.parametrize("chip", chip_names("gpu"))
def test_a_step_is_one_graph(chip, model, tokens):
    """One command buffer holds the whole executable; no loop that the host drives."""
    step = compiled(chip, model, tokens, 0)
    assert (step.command_buffers, step.outer_thunks) == (1, 1)
    assert "while(" not in step.text


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("chip", chip_names("gpu"))
def test_the_sampler_of_a_step_is_one_graph(chip, model):
    """With the head's product."""
    sampler = compiled(chip, model, DECODE, 0, "sample")
    assert (sampler.command_buffers, sampler.outer_thunks) == (1, 1)
    assert "while(" not in sampler.text


@pytest.mark.parametrize("model", with_seldom(["qwen3-0.6b"], ["gemma-3-4b", "llama-3.1-8b"]))
@pytest.mark.parametrize("chip", chip_names())
def test_static_efficiency(chip, model):
    """A decode step moves little more than its weights and its live keys and values."""
    plan = prepared(chip, model, 0)
    kinds = [kind for kind, size in plan.decode_names(DECODE) if size == DECODE]
    assert kinds == ["step", "sample"]
    if plan.target.chip.platform == "tpu":  # whose other executables here are not scheduled as they are for users
        executables = {kind: compile_one(plan, (kind, DECODE), plan.jobs()[kind, DECODE]) for kind in kinds}
    else:
        executables = {kind: compiled(chip, model, DECODE, 0, kind) for kind in kinds}
    texts = {kind: executable.text for kind, executable in executables.items()}
    found = efficiency.efficiency(plan, texts, DECODE, CONTEXT)
    assert found.open_loops == 0
    assert 1 <= found.uncached_ratio < 1.1
    assert found.ratio < 1.25  # with what a GPU's L2 cache can hold
