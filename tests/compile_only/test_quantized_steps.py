"""Decode steps of Llama-3.1-8B with quantised weights, compiled for chips that are not there: what they move is hardly
more than the codes and scales.

Two and four layers are compiled, with the head; what the last two add is what each pair of the others does.
"""

from functools import cache

import pytest

from jaxllm.aot.chips import CHIPS, parse_target
from jaxllm.aot.efficiency import Efficiency, efficiency
from jaxllm.aot.prepare import Prepared
from jaxllm.aot.report import compile_one
from tests.compile_only.targets import chip_names, prepare_few_layers, with_seldom

pytestmark = pytest.mark.timeout(1800)

LAYERS = 32
CONTEXT = 1024  # tokens of each sequence
MOST = {"tpu": 1.03, "gpu": 1.08}  # of the fewest bytes; on GPUs with sums of splits, which their cache holds
SIZES = {"max_model_len": 8192, "max_num_seqs": 64, "max_num_batched_tokens": 2048}
KINDS = {  # of the products in layers, as `--quantization` calls them
    "v5e": ("int8", "int4"),
    "v5p": ("int8", "int4"),
    "v6e": ("int8", "int4"),
    "v7x": ("fp8", "int4"),
    "a100": ("int8", "int4"),
    "h100": ("fp8", "int4"),
    "h200": ("fp8", "int4"),
    "b200": ("fp8", "int4"),
}
CASES = [
    pytest.param(*chip.values, kind, marks=chip.marks)
    for chip in chip_names()
    for kind in with_seldom(["int4"], KINDS[chip.values[0]][:1])
]


@cache
def prepared(chip: str, kind: str, num_layers: int) -> Prepared:
    return prepare_few_layers("llama-3.1-8b", num_layers, parse_target(f"{chip}-1"), quantization=kind, **SIZES)


@cache
def compiled(chip: str, kind: str, num_layers: int, name: tuple[str, int]) -> str:
    plan = prepared(chip, kind, num_layers)
    return compile_one(plan, name, plan.jobs()[name]).text


def counted(chip: str, kind: str, batch: int, num_layers: int) -> Efficiency:
    plan = prepared(chip, kind, num_layers)
    step, sample = plan.decode_names(batch)
    texts = {"step": compiled(chip, kind, num_layers, step), "sample": compiled(chip, kind, 2, sample)}  # of any layers
    return efficiency(plan, texts, batch, CONTEXT)


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize(("chip", "kind"), CASES)
def test_a_decode_step_moves_the_codes_and_little_more(chip, kind, batch):
    two, four = (counted(chip, kind, batch, num_layers) for num_layers in (2, 4))
    pairs = (LAYERS - 2) // 2
    moved = two.total + pairs * (four.total - two.total)
    fewest = two.fewest + pairs * (four.fewest - two.fewest)
    assert 1 <= moved / fewest < MOST[CHIPS[chip].platform], dict(four.largest)
    assert four.open_loops == 0
