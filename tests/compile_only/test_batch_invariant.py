"""What a batch-invariant engine runs on chips that are not there: its kernels alone make sums, the pool stays where it
is, and what is left to XLA are operations on single elements, whose roundings it may not leave out."""

import math
import re
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxllm.aot import hlo
from jaxllm.aot.chips import parse_target
from jaxllm.aot.prepare import Prepared
from jaxllm.aot.report import Executable, compile_one
from jaxllm.engine.device import memory
from jaxllm.models.served import Arithmetic, token_logprobs
from jaxllm.pallas_kernels.dispatch import Placement
from jaxllm.pallas_kernels.matmul import gpu
from jaxllm.pallas_kernels.paged_attention import PagedBatch, gpu_in_order
from tests.compile_only.targets import WHOLE, chip_names, compile_on, mesh_of, prepare_few_layers, with_seldom
from tests.compile_only.test_gpu_attention import MODELS, kernels, operands

LAYERS = {"qwen3-0.6b": 2, "gemma-3-4b": 6}  # of both kinds
TRAINED_LAYERS = 1  # its backward pass compiles for minutes
SAMPLES, CHUNK = 8, 512
COUNTS = "rch,rcl->rhl"  # how token_counts/tpu counts: whole numbers, of which every order has the same sum

pytestmark = pytest.mark.timeout(1800)


@cache
def prepared(chip: str, model: str, num_layers: int | None = None) -> Prepared:
    sizes = {"max_model_len": 8192, "max_num_seqs": SAMPLES, "max_num_batched_tokens": CHUNK}
    return prepare_few_layers(
        model, num_layers or LAYERS[model], parse_target(f"{chip}-1"), batch_invariant=True, **sizes
    )


@cache
def compiled(chip: str, model: str, name) -> Executable:
    plan = prepared(chip, model)
    return compile_one(plan, name, plan.jobs()[name])


def sizes(op: hlo.Instruction) -> int:
    return sum(math.prod(array.dims) for array in hlo.arrays(op.shape))


def check(module: hlo.Module) -> None:
    """XLA multiplies no matrices, adds up nothing, and computes nothing in bfloat16, nor with another emitter than for
    other sizes."""
    for computation in module.computations.values():
        for op in computation.instructions.values():
            dtypes = {array.dtype for array in hlo.arrays(op.shape)} & {"f32", "bf16"}
            if not dtypes or COUNTS in op.attributes:
                continue
            assert op.opcode not in ("dot", "convolution", "all-reduce", "reduce-window"), op
            assert '"__triton"' not in op.attributes, op
            assert op.opcode not in ("add", "subtract", "multiply", "divide", "exponential") or dtypes == {"f32"}, op
            if op.opcode == "reduce" and sizes(computation.instructions[op.operands[0]]) > sizes(op):
                (combiner,) = re.findall(r"to_apply=%?([\w.\-]+)", op.attributes)
                kinds = {each.opcode for each in module.computations[combiner].instructions.values()}
                assert not kinds & {"add", "multiply"}, op


@pytest.mark.parametrize(
    ("model", "tokens"),
    with_seldom([("qwen3-0.6b", CHUNK), ("gemma-3-4b", SAMPLES)], [("qwen3-0.6b", SAMPLES), ("gemma-3-4b", CHUNK)]),
)
@pytest.mark.parametrize("chip", chip_names())
def test_steps(chip, model, tokens):
    plan, step = prepared(chip, model), compiled(chip, model, ("step", tokens))
    check(hlo.parse(step.text))
    products = len(re.findall(r"custom-call\([^\n]*jaxllm_matmul", step.text))
    assert products == 4 * LAYERS[model]
    assert step.alias_bytes >= memory.leaf_bytes(plan.lowering.state().kv_pools)
    assert step.temp_bytes <= memory.step_bytes(plan.shape, plan.config, plan.mesh)
    pools = {pool.shape for pool in plan.lowering.state().kv_pools}
    for computation in hlo.parse(step.text).computations.values():
        for op in computation.instructions.values():
            moved = op.opcode in ("copy", "copy-start", "transpose", "scatter")
            assert not moved or not any(array.dims in pools for array in hlo.arrays(op.shape)), op


SAMPLERS = with_seldom(
    [("sample", SAMPLES), ("sample_full", SAMPLES), "prompt_logprobs"], [(n, SAMPLES) for n in ("logits", "alter")]
)


@pytest.mark.parametrize("name", SAMPLERS, ids=str)
@pytest.mark.parametrize("chip", chip_names())
def test_samplers(chip, name):
    executable = compiled(chip, "qwen3-0.6b", name)
    check(hlo.parse(executable.text))
    plan = prepared(chip, "qwen3-0.6b")
    assert executable.temp_bytes <= memory.step_bytes(plan.shape, plan.config, plan.mesh)


@pytest.mark.parametrize("chip", chip_names())
def test_a_trainers_log_probabilities(chip):
    """By the same kernels, whose forward pass has no sums of XLA's, and with a gradient."""
    plan, mesh = prepared(chip, "qwen3-0.6b", TRAINED_LAYERS), mesh_of(chip)
    arithmetic = Arithmetic(placement=Placement(mesh, batch_invariant=True), block_size=32, max_len=256)

    def logprobs(leaves, tokens):
        return token_logprobs(plan.shape.model(leaves), tokens, arithmetic=arithmetic)

    def gradient(leaves, tokens):
        return jax.grad(lambda leaves: jnp.sum(logprobs(leaves, tokens)))(leaves)

    place = partial(jax.ShapeDtypeStruct, sharding=NamedSharding(mesh, PartitionSpec()))
    given = [place(leaf.shape, leaf.dtype) for leaf in plan.shape.leaves], place((3, 100), jnp.int32)
    with jax.set_mesh(mesh), jax.numpy_dtype_promotion("standard"):  # JAX's own attention promotes
        forward, backward = (jax.jit(fn).lower(*given) for fn in (logprobs, gradient))
        text = forward.compile().as_text()
        assert "jaxllm_matmul" in (backward.compile() if WHOLE else backward).as_text()
    check(hlo.parse(text))
    assert text.count("jaxllm_matmul") >= 4 * TRAINED_LAYERS + 1


def ptx(chip: str, directory: Path, fn, *arguments) -> dict[str, str]:
    options = {"xla_dump_to": str(directory), "xla_dump_emitter_re": "ptx"}
    compile_on(mesh_of(chip), fn, *arguments, compiler_options=options)
    return {name: text for name, (text, _) in kernels(directory).items()}


def arithmetic(text: str) -> list[str]:
    """A kernel's operations on floats, in order."""
    return re.findall(
        r"\b(?:wgmma\.mma_async\.sync|mma\.sync|add|sub|mul|fma|div|ex2|max|cvt)\.[\w.]*(?:f32|bf16)[\w.]*", text
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("chip", chip_names("gpu"))
def test_products_of_any_number_of_rows_are_the_same_instructions(chip, dtype, tmp_path):
    found = []
    for rows in (1, 64, 2048):
        fn = partial(gpu.einsum, "...a,ab->...b")
        texts = ptx(chip, tmp_path / str(rows), fn, ((rows, 4096), dtype), ((4096, 1024), dtype))
        found.append(arithmetic(texts["jaxllm_matmul"]))
    assert found[0] == found[1] == found[2]
    assert any("mma" in each if dtype == "bfloat16" else each.startswith("fma") for each in found[0])


@pytest.mark.parametrize(
    ("model", "pool_dtype"), [("llama-3.1-8b", None), ("llama-3.1-8b", "int8"), ("gemma-3-4b", None)]
)
@pytest.mark.parametrize("chip", chip_names("gpu"))
def test_attention_of_any_number_of_tokens_is_the_same_instructions(chip, model, pool_dtype, tmp_path):
    heads, kv_heads, head_dim, window = MODELS[model]
    op = partial(gpu_in_order.ragged_paged_attention, scale=head_dim**-0.5, sliding_window=window)
    scales = [] if pool_dtype is None else [((2, kv_heads), jnp.float32)]

    def attend(*args):
        more = {"kv_scales": args[8]} if scales else {}
        return op(*args[:4], PagedBatch(*args[4:8]), **more)

    found = []
    for tokens, seqs, blocks in ((1, 1, 64), (64, 64, 2048), (2048, 256, 2048)):
        shapes = operands(MODELS[model], (tokens, seqs, 32, blocks), jnp.bfloat16, pool_dtype or jnp.bfloat16)
        texts = ptx(chip, tmp_path / str(tokens), attend, *shapes, *scales)
        found.append(arithmetic(texts["attend_in_order"]))
    assert found[0] == found[1] == found[2] and any("mma" in each for each in found[0])


@pytest.mark.parametrize("chip", chip_names("gpu"))
def test_a_gpu_rounds_a_product_before_it_is_added(chip, tmp_path):
    """Else what XLA fuses decided over a row's bits."""
    (text,) = ptx(chip, tmp_path, lambda x, y, z: x * y + z, *[((64, 64), jnp.float32)] * 3).values()
    assert "mul.rn.f32" in text and "add.rn.f32" in text and "fma" not in text
