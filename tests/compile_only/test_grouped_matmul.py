"""Products of experts compiled for chips that are not there: no copy of a weight, none that is transposed or widened,
and on GPUs nothing spilled. XLA's own grouped product is compared where it has one."""

import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from jaxllm.aot import hlo
from jaxllm.pallas_kernels.grouped_matmul import gpu, tpu
from jaxllm.pallas_kernels.quantized_matmul import QuantizedWeight
from tests.compile_only.targets import chip_names, compile_on, mesh_of, with_seldom
from tests.compile_only.test_gpu_attention import kernels
from tests.compile_only.test_quantized_matmul import temp_bytes

pytestmark = pytest.mark.timeout(900)

# Experts, those of a token, width of tokens and of experts.
QWEN3 = (128, 8, 2048, 768)  # 30B-A3B
MIXTRAL = (8, 2, 4096, 14336)
GPT_OSS, GPT_OSS_PART = (32, 4, 2880, 2880), (16, 4, 2880, 2880)  # 20b, and 120b of expert=8
# Dtypes of codes and scales, inputs of a group, offsets; None: bfloat16.
INT8, FLOAT8 = ("int8", "float32", None, False), ("float8_e4m3fn", "float32", None, False)
INT4, UINT4 = ("int4", "bfloat16", 128, False), ("uint4", "float16", 128, True)
MXFP4 = ("float4_e2m1fn", "float8_e8m0fnu", 32, False)
CASES = {
    "qwen3": (QWEN3, None),
    "qwen3 int8": (QWEN3, INT8),
    "qwen3 float8": (QWEN3, FLOAT8),
    "qwen3 int4": (QWEN3, INT4),
    "qwen3 uint4": (QWEN3, UINT4),
    "mixtral": (MIXTRAL, None),
    "mixtral int4": (MIXTRAL, INT4),
    "gpt-oss mxfp4": (GPT_OSS, MXFP4),
    "gpt-oss mxfp4, a part": (GPT_OSS_PART, MXFP4),
}
OFTEN = [("qwen3", 8), ("qwen3 int8", 8), ("qwen3 int4", 8), ("gpt-oss mxfp4", 8)]  # tokens of a decode
OFTEN += [("qwen3", 512), ("qwen3 int4", 512)]  # of a prompt
SIZES = with_seldom(OFTEN, [(case, n) for case in CASES for n in (1, 8, 512) if (case, n) not in OFTEN])


def shapes_of(case, product, tokens):
    """Of x, offsets and the weight's parts."""
    (experts, top_k, embed, mlp), form = CASES[case]
    inputs, outputs = (embed, (2, mlp)) if product == "gate_up" else (mlp, (embed,))
    given = [((tokens * top_k, inputs), "bfloat16"), ((experts + 1,), "int32")]
    if form is None:
        return [*given, ((experts, inputs, *outputs), "bfloat16")]
    codes, scales, group, has_offsets = form
    if group is None:
        return [*given, ((experts, *outputs, inputs), codes), ((experts, *outputs), scales)]
    shape = (experts, inputs // group, 1, *outputs)
    given += [((experts, inputs // group, group, *outputs), codes), (shape, scales)]
    return given + [(shape, "float32")] * has_offsets


def compile_product(product_of, chip, shapes, **options):
    def fn(x, offsets, *parts):
        return product_of(x, parts[0] if len(parts) == 1 else QuantizedWeight(*parts), offsets)

    shapes = [(shape, jnp.dtype(dtype)) for shape, dtype in shapes]
    return compile_on(mesh_of(chip), fn, *shapes, **options)


def made(compiled, numbers):
    """Instructions of the entry that make arrays of at least so many numbers."""
    entry = hlo.parse(compiled.as_text()).entry
    given = ("parameter", "bitcast", "get-tuple-element", "tuple")
    ops = [op for op in entry.instructions.values() if op.opcode not in given]
    return [op.name for op in ops if any(math.prod(a.dims) >= numbers for a in hlo.arrays(op.shape))]


@pytest.mark.parametrize(("case", "tokens"), SIZES)
@pytest.mark.parametrize("product", ["gate_up", "down"])
@pytest.mark.parametrize("chip", chip_names("tpu"))
def test_a_tpu_reads_weights_as_they_are(chip, case, product, tokens):
    shapes = shapes_of(case, product, tokens)
    compiled = compile_product(tpu.product, chip, shapes)
    assert compiled.as_text().count('custom_call_target="tpu_custom_call"') == 1
    assert not made(compiled, math.prod(shapes[2][0]) // 2)
    (rows, inputs), weight = shapes[0][0], math.prod(shapes[2][0])
    scales = math.prod(shapes[3][0]) if len(shapes) > 3 else 0
    assert temp_bytes(compiled) < 4 * rows * (inputs + weight // inputs // shapes[1][0][0]) + 2 * scales + 2**20


@pytest.mark.parametrize("chip", chip_names("tpu"))
def test_the_tpu_s_own_product_computes_more(chip):
    """What XLA makes of `ragged_dot`: of gate and up it copies the weight, and of a prompt it multiplies tiles of which
    most rows are other experts'; of a decode it reads as few weights as the kernel."""

    def product(x, weight, offsets):
        weight = weight.reshape(*weight.shape[:2], -1)
        return jax.lax.ragged_dot(x, weight, jnp.diff(offsets), preferred_element_type=jnp.float32)

    gate_up, down = (shapes_of("qwen3", name, 512) for name in ("gate_up", "down"))
    weight = math.prod(gate_up[2][0])
    assert temp_bytes(compile_product(product, chip, gate_up)) > weight  # bytes: a copy of it
    compiled = compile_product(product, chip, down)
    assert temp_bytes(compiled) < weight // 8
    tile = int(re.search(r'ragged_dot_tiling="(\d+),', compiled.as_text()).group(1))
    rows, experts = down[0][0][0], QWEN3[0]
    assert (rows // tile + experts - 1) * tile > 1.2 * rows  # each border of experts is a tile more


@pytest.mark.parametrize(("case", "tokens"), SIZES)
@pytest.mark.parametrize("product", ["gate_up", "down"])
@pytest.mark.parametrize("chip", chip_names("gpu"))
def test_a_gpu_reads_weights_as_they_are(chip, case, product, tokens, tmp_path):
    shapes = shapes_of(case, product, tokens)
    options = {"xla_dump_to": str(tmp_path), "xla_dump_emitter_re": "ptx"}
    compiled = compile_product(gpu.product, chip, shapes, compiler_options=options)
    assert not made(compiled, math.prod(shapes[2][0]) // 2)
    x, weight = (jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in (shapes[0], shapes[2]))
    if len(shapes) > 3:
        weight = QuantizedWeight(*(jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in shapes[2:]))
    spec = gpu.plan(*jax.eval_shape(partial(gpu.flatten, num_inputs=1), x, weight))
    assert temp_bytes(compiled) < 4 * (spec.splits + 1) * len(x.shape) * x.shape[0] * spec.outputs + 2**16
    ((text, spilled),) = [kernel for name, kernel in kernels(tmp_path).items() if "grouped_matmul" in name]
    assert spilled == 0
    assert ("mma.sync" if chip == "a100" else "wgmma.mma_async") in text and "cp.async" in text
