"""Whole steps of well-known shapes, compiled for chips that are not there, as the engine would compile them.

One decode step and one mixed step of each: they fit, the pool stays where it is, and the attention kernel runs. What is
checked holds layer by layer, so that models have their first few layers; JAXLLM_WHOLE=1 compiles all.
"""

import json
import os
import re
import tempfile
from functools import cache
from pathlib import Path

import pytest

from jaxllm.aot import efficiency, hlo, traffic
from jaxllm.aot.chips import parse_target
from jaxllm.aot.prepare import Prepared, find_model, prepare
from jaxllm.aot.report import Executable, compile_one
from jaxllm.engine.device import memory
from tests.compile_only.targets import chip_names

FEW_LAYERS = {"llama-3.1-8b": 4, "qwen3-0.6b": 4, "gemma-3-4b": 6}  # of both kinds
MODELS = tuple(FEW_LAYERS)
DEVICES = {("v5e", "llama-3.1-8b"): 4}  # others fit one
DECODE, MIXED = 64, 2048  # tokens
CONTEXT = 1024  # tokens of each sequence that is decoded

pytestmark = pytest.mark.timeout(1800)


@cache  # by every argument, so that each step compiles once; `count` 0 is as many devices as it needs
def prepared(chip: str, model: str, count: int) -> Prepared:
    target = parse_target(f"{chip}-{count or DEVICES.get((chip, model), 1)}")
    sizes = {"max_model_len": 8192, "max_num_seqs": DECODE, "max_num_batched_tokens": MIXED}
    if os.environ.get("JAXLLM_WHOLE"):
        return prepare(model, target, **sizes)
    config = json.loads((find_model(model) / "config.json").read_text())
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(config | {"num_hidden_layers": FEW_LAYERS[model]}))
        return prepare(directory, target, **sizes)


@cache
def compiled(chip: str, model: str, tokens: int, count: int, kind: str = "step") -> Executable:
    plan = prepared(chip, model, count)
    return compile_one(plan, (kind, tokens), plan.jobs()[kind, tokens])


def counted(chip: str, model: str, tokens: int, count: int) -> traffic.Traffic:
    module = hlo.parse(compiled(chip, model, tokens, count).text)
    return traffic.count(module, lambda p: "pool" if p.op_name.startswith("kv_pools[") else "rest")


def pool_arrays(plan: Prepared) -> set[tuple[int, ...]]:
    """Dimensions of a device's part of a layer's pool."""
    return {pool.sharding.shard_shape(pool.shape) for pool in plan.lowering.state().kv_pools}


def check(chip: str, model: str, tokens: int, count: int = 0) -> None:
    plan, step = prepared(chip, model, count), compiled(chip, model, tokens, count)
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
    moved = counted(chip, model, tokens, count)
    assert moved.pallas_calls >= plan.cfg.num_layers
    assert moved.num_bytes["pool"] == 0, "something but the attention kernel touches the pool"


@pytest.mark.parametrize("tokens", [DECODE, MIXED])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("chip", chip_names())
def test_steps(chip, model, tokens):
    check(chip, model, tokens)


@pytest.mark.parametrize("chip", chip_names())
def test_a_step_on_two_devices(chip):
    check(chip, "qwen3-0.6b", DECODE, count=2)


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


@pytest.mark.parametrize("tokens", [DECODE, MIXED])
@pytest.mark.parametrize("model", MODELS)
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


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("chip", chip_names())
def test_static_efficiency(chip, model):
    """A decode step moves little more than its weights and its live keys and values."""
    plan = prepared(chip, model, 0)
    kinds = [kind for kind, size in plan.decode_names(DECODE) if size == DECODE]
    assert kinds == ["step", "sample"]
    texts = {kind: compiled(chip, model, DECODE, 0, kind).text for kind in kinds}
    found = efficiency.efficiency(plan, texts, DECODE, CONTEXT)
    assert found.open_loops == 0
    assert 1 <= found.uncached_ratio < 1.1
    assert found.ratio < 1.25  # with what a GPU's L2 cache can hold
