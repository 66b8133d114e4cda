"""Products with quantised weights compiled for chips that are not there: no copy of the weight in 16 bits, none that is
transposed, and dot products of eight bits where rows may be rounded to them."""

import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from jaxllm.pallas_kernels.quantized_matmul import QuantizedWeight, gpu, tpu
from tests.compile_only.targets import chip_names, compile_on, mesh_of, with_seldom

pytestmark = pytest.mark.timeout(900)

INPUTS, HEADS = 4096, (8, 6, 128)  # the queries, keys and values of an 8B model
OUTPUTS = math.prod(HEADS)
WEIGHT = INPUTS * OUTPUTS  # numbers
FEW, MANY = 8, 512
# Dtypes of codes and scales; inputs of a group; offsets.
FORMS = {
    "int8 by output": ("int8", "float32", None, False),
    "int4 by output": ("int4", "bfloat16", None, False),
    "float8 by output": ("float8_e4m3fn", "float32", None, False),
    "int8 by group": ("int8", "bfloat16", 128, False),
    "int4 by group": ("int4", "bfloat16", 128, False),
    "int4 by small group": ("int4", "float16", 32, False),
    "uint4 by group": ("uint4", "float16", 128, True),
    "float8 by group": ("float8_e4m3fn", "float32", 128, False),
    "float4 by group": ("float4_e2m1fn", "float8_e8m0fnu", 32, False),
}


def compile_product(module, chip, form, rows, *, compiler_options=None, **options):
    codes, scales, group, has_offsets = FORMS[form]
    groups = () if group is None else (INPUTS // group,)
    code_shape = (*HEADS, INPUTS) if group is None else (*groups, group, *HEADS)
    scale_shape = HEADS if group is None else (*groups, 1, *HEADS)
    given = [((rows, INPUTS), jnp.bfloat16), (code_shape, codes), (scale_shape, scales)]
    given += [(scale_shape, jnp.float32)] * has_offsets
    fn = partial(module.product, num_inputs=1, **options)
    given = [(shape, jnp.dtype(dtype)) for shape, dtype in given]
    return compile_on(
        mesh_of(chip), lambda x, *weight: fn(x, QuantizedWeight(*weight)), *given, compiler_options=compiler_options
    )


def temp_bytes(compiled: jax.stages.Compiled) -> int:
    return compiled.memory_analysis().temp_size_in_bytes


def size(line: str) -> int:
    """Elements of an instruction's result."""
    return math.prod(map(int, filter(None, re.search(r"\[([\d,]*)\]", line).group(1).split(","))))


MANY_OFTEN = ("int8 by output", "int4 by group", "float8 by output")


@pytest.mark.parametrize(
    ("form", "rows"),
    with_seldom(
        [*((form, FEW) for form in FORMS), *((form, MANY) for form in MANY_OFTEN)],
        [(form, MANY) for form in FORMS if form not in MANY_OFTEN],
    ),
)
@pytest.mark.parametrize("chip", chip_names("tpu"))
def test_a_tpu_reads_the_codes(chip, form, rows):
    compiled = compile_product(tpu, chip, form, rows)
    most = 2 * rows * (INPUTS + OUTPUTS) * 4 + (1 << 20)  # some rows, float32
    assert temp_bytes(compiled) < min(most, WEIGHT // 2 if rows == FEW else WEIGHT)
    copied = re.compile(r"= (bf16|f32)\[[\d,]*\]\S* (copy|transpose)\(")
    assert not [line for line in compiled.as_text().splitlines() if copied.search(line) and size(line) >= WEIGHT]


@pytest.mark.parametrize("chip", chip_names("tpu"))
def test_a_tpu_multiplies_many_rounded_rows_in_eight_bits(chip):
    name, _ = tpu.EIGHT_BITS[mesh_of(chip).devices.flat[0].device_kind]
    form, in_eight, sums = {
        "int8": ("int8 by output", r"\bs8\[", r"= s32\["),
        "float8_e4m3fn": ("float8 by output", r"\bf8e4m3fn\[", r"= f32\["),
    }[name]
    for rows in (FEW, MANY):
        text = compile_product(tpu, chip, form, rows, activations=name).as_text()
        products = [line for line in text.splitlines() if re.search(r"\b(convolution|dot)\(", line)]
        assert products
        rounded = [line for line in products if len(re.findall(in_eight, operands(text, line))) == 2]
        assert bool(rounded) == (rows == MANY)
        assert all(re.search(sums, line) for line in rounded)


def operands(text: str, line: str) -> str:
    """The lines that define what an instruction multiplies."""
    names = re.findall(r"%[\w.-]+", re.search(r"\b(?:convolution|dot)\(([^)]*)\)", line).group(1))
    return "\n".join(re.search(rf"^\s*(?:ROOT )?{re.escape(n)} = \S+", text, re.MULTILINE).group(0) for n in names)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("chip", chip_names("gpu"))
def test_a_gpu_reads_the_codes_of_few_rows(chip, form):
    compiled = compile_product(gpu, chip, form, FEW)
    assert "jaxllm_quantized_matmul" in compiled.as_text()
    assert temp_bytes(compiled) < WEIGHT // 8  # sums of splits; float32 of all of 8 rows is 0.2 MB


@pytest.mark.parametrize("library", ["cuBLASLt", "Triton"])
@pytest.mark.parametrize("form", ["float8 by output", "int8 by output"])
@pytest.mark.parametrize("chip", [chip for chip in chip_names("gpu") if chip.values[0] != "a100"])
def test_a_gpu_multiplies_rounded_rows_in_eight_bits(chip, form, library):
    """XLA chooses between two ways on a device: neither transposes or widens the weight."""
    options = {"xla_gpu_enable_triton_gemm": library == "Triton"}
    codes = FORMS[form][0]
    compiled = compile_product(gpu, chip, form, MANY, activations=codes, compiler_options=options)
    text = compiled.as_text()
    eight, sums = ("f8e4m3fn", "f32") if "float8" in form else ("s8", "s32")
    if library == "Triton":
        assert re.search(rf"= {sums}\[{MANY},{OUTPUTS}\]\S* dot\(", text)
        assert re.search(rf"{eight}\[{MANY},{INPUTS}\]\S* parameter", text)
        assert re.search(rf"{eight}\[{INPUTS},{OUTPUTS}\]\{{0,1\}} parameter", text)
    else:
        target = "__cublas$lt$matmul$f8" if "float8" in form else "__cublas$lt$matmul"
        assert f'custom_call_target="{target}"' in text and f"({sums}[{MANY},{OUTPUTS}]" in text
    assert temp_bytes(compiled) < 2 * MANY * OUTPUTS * 4 + WEIGHT // 2  # sums, the rounded rows and a workspace
    altered = re.compile(r"= \w+\[[\d,]*\]\S* (transpose|copy|convert)\(")
    assert not [line for line in text.splitlines() if altered.search(line) and size(line) >= WEIGHT]


@pytest.mark.parametrize("chip", [chip for chip in chip_names("gpu") if chip.values[0] == "a100"])
def test_an_a100_has_no_float8(chip):
    text = compile_product(gpu, chip, "float8 by output", FEW, activations="float8_e4m3fn").as_text()
    assert "jaxllm_quantized_matmul" in text
