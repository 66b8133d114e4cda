"""Steps of Llama 3.3 70B, in few layers, on several devices and hosts: what they send, and to whom."""

from functools import cache

import pytest

from jaxllm.aot import floors
from jaxllm.aot.chips import parse_target
from jaxllm.aot.prepare import Prepared
from jaxllm.engine.device import memory
from tests.compile_only.targets import chip_names, compile_structure, prepare_few_layers

LAYERS, ROWS, EMBED, VOCAB = 2, 64, 8192, 128256

pytestmark = pytest.mark.timeout(1800)


@cache
def prepared(chip: str, count: int) -> Prepared:
    target, sizes = parse_target(f"{chip}-{count}"), {"max_model_len": 8192, "max_num_seqs": ROWS}
    return prepare_few_layers("llama-3.3-70b", LAYERS, target, **sizes, num_blocks=4096)


@pytest.mark.parametrize("chip", chip_names())
def test_a_step_sums_twice_a_layer_and_once_for_the_table(chip):
    """On 16 devices, which several hosts have: no other collective, and nothing else crosses."""
    plan = prepared(chip, 16)
    assert len(set(plan.hosts)) == plan.target.num_hosts == (2 if plan.target.chip.platform == "gpu" else 4)
    found = compile_structure(plan, ("step", ROWS))
    (((kind, crosses), sent),) = floors.sent_by(plan, {"step": found.text}, 1).items()
    assert (kind, crosses) == ("all-reduce", True)
    assert (sent.count, sent.operand_bytes) == (2 * LAYERS + 1, (2 * LAYERS + 1) * ROWS * EMBED * 2)
    if plan.target.chip.platform == "gpu":
        assert sent.network_bytes == sent.operand_bytes // 8  # twice, by half, an eighth of what a host has
        assert sent.link_bytes == 2 * sent.operand_bytes * 7 // 8
    else:
        assert (sent.network_bytes, sent.link_bytes) == (0, 2 * sent.operand_bytes * 15 // 16)


@pytest.mark.parametrize("chip", chip_names())
def test_a_sampler_sends_logits_at_most(chip):
    """And no weight: the head stays where it lies, and the bound on temporary memory covers the sampler."""
    plan = prepared(chip, 8)
    found = compile_structure(plan, ("sample", ROWS))
    sent = floors.sent_by(plan, {"sample": found.text}, 1)
    assert sum(each.operand_bytes for each in sent.values()) <= ROWS * VOCAB // 8 * 4 + 16 * ROWS * 4
    assert found.temp_bytes <= memory.step_bytes(plan.shape, plan.config, plan.mesh)
