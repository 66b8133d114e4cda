"""The GPU's attention kernels compiled for chips that are not there: they fit, spill (almost) nothing, use the tensor
cores that the chip has, and leave the pool where it is; the launches of several layers are one graph."""

import importlib.util
import math
import re
import subprocess
from functools import partial
from pathlib import Path

import jax.numpy as jnp
import pytest

from jaxllm.pallas_kernels.paged_attention import PagedBatch, gpu, kv_shape
from tests.compile_only.targets import chip_names, compile_on, mesh_of, with_seldom

NUM_BLOCKS = 1024
# Heads, KV heads, head_dim, sliding window: whole models, and a device's part of them.
MODELS = {
    "llama-3.1-8b": (32, 8, 128, None),
    "llama-3.1-8b tensor=4": (8, 2, 128, None),
    "llama-3.1-8b tensor=8": (4, 1, 128, None),
    "qwen3-0.6b": (16, 8, 128, None),
    "gemma-3-4b": (8, 4, 256, 1024),
    "gemma-3-4b tensor=4": (2, 1, 256, 1024),
}
ENCODERS = {"bge-base": (12, 12, 64, None), "modernbert": (12, 12, 64, 65), "embeddinggemma-300m": (3, 1, 256, 257)}
# Tokens, sequences, block size, blocks a sequence.
STEPS = {
    "decode 8": (8, 8, 16, 2048),
    "decode 64": (64, 64, 32, 4096),
    "decode 256": (256, 256, 64, 512),
    "mixed 512": (512, 64, 16, 2048),
    "mixed 2048": (2048, 256, 32, 4096),
}
# Bytes a thread may spill: what it keeps from one sequence to the next, outside the loops over keys. Few where
# head_dim is 128.
FEW_SPILLED = 32
MOST_SPILLED = {"attend_rows": 32, "combine_splits": 0, "attend_tiles": 256}


def ptxas() -> str:
    package = importlib.util.find_spec("nvidia")
    found = [p for root in package.submodule_search_locations for p in Path(root).glob("*/bin/ptxas")]
    return str(found[0]) if found else pytest.skip("no ptxas in the nvidia packages")


def kernels(dump: Path) -> dict[str, tuple[str, int]]:
    """PTX of each kernel that was dumped, and the bytes that its threads spill."""
    result = {}
    for path in dump.glob("*.ptx"):
        text = path.read_text()
        arch = re.search(r"\.target (\w+)", text).group(1)
        command = [ptxas(), "-v", f"-arch={arch}", str(path), "-o", "/dev/null"]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        name = re.search(r"Compiling entry function '(\w+)'", log).group(1)
        result[name] = text, int(re.search(r"(\d+) bytes spill stores", log).group(1))
    return result


def operands(model, step, dtype, pool_dtype):
    (heads, kv_heads, head_dim, _), (tokens, seqs, block_size, blocks_per_seq) = model, step
    pool = kv_shape(NUM_BLOCKS, block_size, kv_heads, head_dim, platform="gpu")
    shapes = [((tokens, n, head_dim), dtype) for n in (heads, kv_heads, kv_heads)]
    shapes += [(pool, pool_dtype), ((seqs, blocks_per_seq), jnp.int32)]
    return shapes + [((n,), jnp.int32) for n in (seqs + 1, seqs, 2)]


def check(chip, model, step, dump, dtype=jnp.bfloat16, pool_dtype=None, **options):
    """Compiles the op and returns its kernels."""
    (heads, kv_heads, head_dim, window), (tokens, seqs, block_size, blocks_per_seq) = model, step
    pool_dtype = jnp.dtype(pool_dtype or dtype)
    extra = {"sinks": ((heads,), jnp.float32), "kv_scales": ((2, kv_heads), jnp.float32)}
    names = [name for name in extra if options.pop(name, False)]
    op = partial(gpu.ragged_paged_attention, scale=head_dim**-0.5, sliding_window=window, **options)
    shapes = operands(model, step, dtype, pool_dtype)
    compiled = compile_on(
        mesh_of(chip),
        lambda *args: op(*args[:4], PagedBatch(*args[4:8]), **dict(zip(names, args[8:], strict=True))),
        *shapes,
        *[extra[name] for name in names],
        donate_argnums=(3,),
        compiler_options={"xla_dump_to": str(dump), "xla_dump_emitter_re": "ptx"},
    )
    run = gpu.plan(
        tokens,
        seqs,
        blocks_per_seq * block_size,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        itemsize=jnp.dtype(dtype).itemsize,
        sliding_window=window,
    )
    memory, (pool, _) = compiled.memory_analysis(), shapes[3]
    assert memory.alias_size_in_bytes == math.prod(pool) * pool_dtype.itemsize
    partials = 4 * run.num_rows * heads * run.rows.splits * (head_dim + 1)
    assert memory.temp_size_in_bytes <= partials + 4 * tokens * (2 * heads + 2 * kv_heads) * head_dim + 2**16
    found = {name: kernel for name, kernel in kernels(dump).items() if name in MOST_SPILLED}
    assert len(found) == (3 if run.num_tiles else 2)
    for name, (_, spilled) in found.items():
        assert spilled <= MOST_SPILLED[name], name
    return found


OFTEN = [("llama-3.1-8b", step) for step in STEPS]
OFTEN += [(model, step) for model in ("llama-3.1-8b tensor=8", "gemma-3-4b") for step in ("decode 64", "mixed 2048")]
SELDOM = [(model, step) for model in MODELS for step in STEPS if (model, step) not in OFTEN]


@pytest.mark.parametrize(("model", "step"), with_seldom(OFTEN, SELDOM))
@pytest.mark.parametrize("chip", chip_names("gpu"))
def test_models(chip, model, step, tmp_path):
    found = check(chip, MODELS[model], STEPS[step], tmp_path)
    if MODELS[model][2] == 128:
        assert all(spilled <= FEW_SPILLED for _, spilled in found.values())
    rows, _ = found["attend_rows"]
    assert "mma.sync" in rows and "cp.async" in rows
    if "attend_tiles" in found:
        tiles, _ = found["attend_tiles"]
        assert ("mma.sync" if chip == "a100" else "wgmma.mma_async") in tiles and "cp.async" in tiles


@pytest.mark.parametrize("step", with_seldom(["mixed 2048"], ["decode 8"]))
@pytest.mark.parametrize("model", ENCODERS)
@pytest.mark.parametrize("chip", chip_names("gpu"))
def test_bidirectional(chip, model, step, tmp_path):
    check(chip, ENCODERS[model], STEPS[step], tmp_path, causal=False)


@pytest.mark.parametrize("pool_dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("step", ["decode 8", "mixed 2048"])
@pytest.mark.parametrize("chip", chip_names("gpu"))
def test_quantised_pools(chip, step, pool_dtype, tmp_path):
    if chip == "a100" and pool_dtype == "float8_e4m3fn":
        pytest.skip("no instruction reads them: refused")
    check(chip, MODELS["llama-3.1-8b"], STEPS[step], tmp_path, pool_dtype=pool_dtype, kv_scales=True)


@pytest.mark.parametrize("chip", chip_names("gpu"))
def test_float32(chip, tmp_path):
    """In full precision: no tensor core."""
    for text, _ in check(chip, MODELS["llama-3.1-8b"], STEPS["decode 64"], tmp_path, jnp.float32).values():
        assert "mma" not in text


@pytest.mark.parametrize("heads", with_seldom([(14, 2, 64), (32, 1, 80)], [(12, 12, 64), (40, 10, 96)]))
@pytest.mark.parametrize("chip", chip_names("gpu"))
def test_other_heads(chip, heads, tmp_path):
    """With all options: sinks as in gpt-oss, a cap as in Gemma 2."""
    check(chip, (*heads, 128), STEPS["mixed 512"], tmp_path, sinks=True, soft_cap=30.0)


@pytest.mark.parametrize("chip", chip_names("gpu"))
def test_layers_are_one_graph(chip, tmp_path):
    """Two launches a layer in a small batch, three in others, and no copy between them."""

    def layers(q, k, v, pool, other_pool, *ints):
        batch = PagedBatch(*ints)
        for _ in range(2):
            out, pool = gpu.ragged_paged_attention(q, k, v, pool, batch, scale=1.0)
            q = q + jnp.tanh(out)
            out, other_pool = gpu.ragged_paged_attention(q, k, v, other_pool, batch, scale=1.0)
            q = q + jnp.tanh(out)
        return q, pool, other_pool

    for step, launches in ("decode 8", 2), ("mixed 512", 3):
        dump = tmp_path / step.replace(" ", "_")
        shapes = operands(MODELS["qwen3-0.6b"], STEPS[step], jnp.bfloat16, jnp.bfloat16)
        compile_on(
            mesh_of(chip),
            layers,
            *shapes[:4],
            shapes[3],
            *shapes[4:],
            donate_argnums=(3, 4),
            compiler_options={"xla_dump_to": str(dump)},
        )
        (path,) = dump.glob("*thunk_sequence_after_thunk_passes.txt")
        thunks = re.findall(r"^( *)\d+: (k\w+)", path.read_text(), re.MULTILINE)
        outer, inner = ([kind for indent, kind in thunks if bool(indent) == nested] for nested in (False, True))
        assert outer == ["kCommandBuffer"]
        assert inner == ["kCustomKernel"] * (4 * (launches + 1)), inner
