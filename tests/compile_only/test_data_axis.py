"""Shards of data, compiled for chips that are not there: v5p-16 and eight H200, with contexts of 128k tokens."""

import re

import pytest

from jaxllm.aot import chips
from jaxllm.aot.report import compile_one
from jaxllm.engine.device import memory
from tests.compile_only.targets import chip_names, prepare_few_layers

LAYERS, CONTEXT, TOKENS, SEQS = 2, 131072, 2048, 16
MESHES = {"tpu": ("v5p-16", "data=4,tensor=4"), "gpu": ("h200-8", "data=2,tensor=4")}
COLLECTIVES = r" (all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute)(?:-start)?\("

pytestmark = pytest.mark.timeout(1800)
platforms = pytest.mark.parametrize(
    "platform", [pytest.param(name, marks=chip_names(name)[0].marks) for name in MESHES if chip_names(name)]
)


@platforms
def test_a_prompt_of_128k_tokens_is_shared(platform):
    """It fits beside the pool, which stays where it is. Each layer gathers keys and values over `data`, which a step
    that shares nothing does not; sums over `tensor` are the same."""
    target, mesh = MESHES[platform]
    sizes = {"max_model_len": CONTEXT, "max_num_seqs": SEQS, "max_num_batched_tokens": TOKENS}
    plan = prepare_few_layers("llama-3.1-8b", LAYERS, chips.parse_target(target), mesh=mesh, **sizes)
    jobs = plan.jobs()
    found = {}
    for kind in ("step", "step_shared"):
        step = compile_one(plan, (kind, TOKENS), jobs[kind, TOKENS])
        found[kind] = re.findall(COLLECTIVES, step.text)
        pool = memory.leaf_bytes(plan.lowering.state().kv_pools)
        assert step.alias_bytes >= pool and step.temp_bytes <= memory.step_bytes(plan.shape, plan.config, plan.mesh)
    gathers = {kind: names.count("all-gather") for kind, names in found.items()}
    assert found["step"].count("all-reduce") == found["step_shared"].count("all-reduce") == 2 * LAYERS + 1
    most = 2 * LAYERS + 2  # keys and values; positions and ids
    assert gathers["step"] == 0 and 0 < gathers["step_shared"] <= most * (2 if platform == "tpu" else 1)  # or in halves
