"""Shards of data, compiled for chips that are not there: contexts of 128k tokens, mixtures of experts, samplers."""

import re
from functools import cache

import pytest

from jaxllm.aot import chips, collectives, hlo
from jaxllm.aot.prepare import Prepared
from jaxllm.aot.report import Executable
from jaxllm.engine.device import memory
from tests.compile_only.targets import (
    MIXTURE_CONFIG,
    chip_names,
    compile_structure,
    prepare_config,
    prepare_few_layers,
    with_seldom,
)

LAYERS, CONTEXT, TOKENS, SEQS = 2, 131072, 2048, 16
MESHES = {"tpu": ("v5p-16", "data=4,tensor=4"), "gpu": ("h200-8", "data=2,tensor=4")}
MIXTURE_MESH, MIXTURE_SEQS = "data=2,expert=2,tensor=2", 64
COLLECTIVES = r" (all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute)(?:-start)?\("

pytestmark = pytest.mark.timeout(1800)
platforms = pytest.mark.parametrize(
    "platform", [pytest.param(p, marks=chip_names(p)[0].marks) for p in with_seldom(["gpu"], ["tpu"]) if chip_names(p)]
)


@platforms
def test_a_prompt_of_128k_tokens_is_shared(platform):
    """It fits beside the pool, which stays where it is. Each layer gathers keys and values over `data`, which a step
    that shares nothing does not; sums over `tensor` are the same."""
    target, mesh = MESHES[platform]
    sizes = {"max_model_len": CONTEXT, "max_num_seqs": SEQS, "max_num_batched_tokens": TOKENS}
    plan = prepare_few_layers("llama-3.1-8b", LAYERS, chips.parse_target(target), mesh=mesh, **sizes)
    found = {}
    for kind in ("step", "step_shared"):
        step = compile_structure(plan, (kind, TOKENS))
        found[kind] = re.findall(COLLECTIVES, step.text)
        pool = memory.leaf_bytes(plan.lowering.state().kv_pools)
        assert step.alias_bytes >= pool and step.temp_bytes <= memory.step_bytes(plan.shape, plan.config, plan.mesh)
    gathers = {kind: names.count("all-gather") for kind, names in found.items()}
    assert found["step"].count("all-reduce") == found["step_shared"].count("all-reduce") == 2 * LAYERS + 1
    most = 2 * LAYERS + 2  # keys and values; positions and ids
    assert gathers["step"] == 0 and 0 < gathers["step_shared"] <= most * (2 if platform == "tpu" else 1)  # or in halves


@cache
def mixture(chip: str) -> Prepared:
    sizes = {"max_model_len": 8192, "max_num_seqs": MIXTURE_SEQS, "max_num_batched_tokens": TOKENS}
    return prepare_config(MIXTURE_CONFIG, chips.parse_target(f"{chip}-8"), mesh=MIXTURE_MESH, **sizes)


def compiled(chip: str, name: object) -> tuple[Executable, collectives.Collectives]:
    """An executable of the mixture, and what devices send: by kind, and whether it goes to the other shard."""
    plan = mixture(chip)
    found = compile_structure(plan, name)
    return found, collectives.count(hlo.parse(found.text), [0] * 4 + [1] * 4, has_network=False)


@pytest.mark.parametrize("kind", ["step", "step_shared"])
@pytest.mark.parametrize("chip", chip_names())
def test_shards_of_a_mixture_of_experts_share_prompts_alone(chip, kind):
    """Experts stay within a shard. A prompt that both compute sends the keys and values of a device's own head."""
    plan, layers, width = mixture(chip), MIXTURE_CONFIG["num_hidden_layers"], MIXTURE_CONFIG["head_dim"]
    tokens = MIXTURE_SEQS if kind == "step" else TOKENS
    found, sent = compiled(chip, (kind, tokens))
    assert found.alias_bytes >= memory.leaf_bytes(plan.lowering.state().kv_pools)
    assert found.temp_bytes <= memory.step_bytes(plan.shape, plan.config, plan.mesh)
    assert sent["all-reduce", False].count == 2 * layers + 1
    assert sent.keys() == {("all-reduce", False), *[("all-gather", True)] * (kind == "step_shared")}
    if kind == "step_shared":
        own = 2 * layers * tokens * width * 2
        assert own <= sent["all-gather", True].operand_bytes <= own + 2 * tokens * 4  # positions and ids


@pytest.mark.parametrize("kind", ["sample", "sample_full"])
@pytest.mark.parametrize("chip", chip_names())
def test_samplers_send_other_shards_what_the_host_reads(chip, kind):
    """Rows are drawn, and log-probabilities and beams' candidates found, where their logits are."""
    found, sent = compiled(chip, (kind, MIXTURE_SEQS))
    crossing = sum(each.operand_bytes for (_, crosses), each in sent.items() if crosses)
    assert 0 < crossing <= found.output_bytes
    assert crossing < MIXTURE_SEQS * MIXTURE_CONFIG["vocab_size"] * 4 // 100


@pytest.mark.parametrize("chip", with_seldom(chip_names("gpu"), chip_names("tpu")))
def test_altered_logits_stay_in_their_shard(chip):
    _, sent = compiled(chip, ("alter", MIXTURE_SEQS))
    assert not any(crosses for _, crosses in sent)
