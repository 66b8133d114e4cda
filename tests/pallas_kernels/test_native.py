"""The native CPU kernels: products against numpy, attention at real sizes against the reference, and how they load."""

import contextlib
import importlib.metadata
import os
import shutil
import subprocess
import threading
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.pallas_kernels import native
from jaxllm.pallas_kernels.matmul import einsum
from jaxllm.pallas_kernels.matmul.native import supports
from jaxllm.pallas_kernels.native import build
from jaxllm.pallas_kernels.paged_attention import PagedBatch, kv_shape, ragged_paged_attention
from jaxllm.pallas_kernels.paged_attention.reference import quantise

needs_library = pytest.mark.skipif(
    not native.is_built(), reason="not built: python -m jaxllm.pallas_kernels.native.build"
)
TOLERANCE = {np.float32: 2e-5, jnp.bfloat16: 1e-2}
# Of int8 keys and values: some are clipped. Odd numbers: XLA multiplies by the inverse, which matters at halves.
SCALES = jnp.array([[0.0213417, 0.0309873], [0.0097643, 0.0412391]])


@needs_library
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("depth", "columns"), [(1, 1), (7, 3), (19, 33), (256, 64), (300, 77), (520, 1056)])
def test_product(depth, columns, transposed, dtype):
    """Sizes that fill no vector, tile or strip, and every count of rows that a tile may have, and of tiles."""
    rng = np.random.default_rng(depth)
    weight = (rng.normal(size=(columns, depth) if transposed else (depth, columns)) / depth**0.5).astype(dtype)
    equation = "...d,nd->...n" if transposed else "...d,dn->...n"
    for rows in [*range(1, 14), 24, 25, 64, 130]:
        x = rng.normal(size=(rows, depth)).astype(dtype)
        got = einsum(equation, jnp.asarray(x), jnp.asarray(weight), implementation="native")
        want = x.astype(np.float64) @ (weight.T if transposed else weight).astype(np.float64)
        assert got.dtype == dtype
        np.testing.assert_allclose(np.asarray(got).astype(np.float64), want, atol=TOLERANCE[dtype], rtol=1e-2)


@needs_library
@pytest.mark.parametrize(
    ("equation", "x", "weight"),
    [
        ("...d,dkgh->...kgh", (3, 16), (16, 2, 3, 8)),
        ("...kgh,kghd->...d", (3, 2, 3, 8), (2, 3, 8, 16)),
        ("...d,dgf->...gf", (2, 2, 16), (16, 2, 24)),
        ("...d,vd->...v", (3, 16), (40, 16)),
    ],
)
def test_equations_of_the_layers(equation, x, weight):
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=x).astype(np.float32), rng.normal(size=weight).astype(np.float32)
    got = jax.jit(lambda x, w: einsum(equation, x, w, implementation="native"))(x, weight)
    want = einsum(equation, jnp.asarray(x), jnp.asarray(weight), implementation="reference")
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), atol=1e-5)


@needs_library
def test_only_operands_of_one_dtype_are_supported():
    weight = jnp.zeros((16, 8))

    def supported(dtype, weight):
        return supports("...d,df->...f", jnp.zeros((8, 16), dtype), weight)

    assert supported(jnp.float32, weight) and supported(jnp.bfloat16, weight.astype(jnp.bfloat16))
    assert not supported(jnp.bfloat16, weight) and not supported(jnp.float16, weight.astype(jnp.float16))


@needs_library
@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="threads don't choose their processors here")
def test_threads_that_leave_a_shared_processor_may_run_anywhere_again():
    x, weight = jnp.ones((16, 512)), jnp.ones((512, 4096))
    product = jax.jit(partial(einsum, "...d,dn->...n", implementation="native"))

    def multiply():
        for _ in range(300):
            np.testing.assert_array_equal(product(x, weight), 512.0)

    callers = [threading.Thread(target=multiply) for _ in range(3)]  # with XLA's threads more than processors
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    give_up = time.monotonic() + 10.0  # one that was woken late has to have its turn first
    while (found := affinities()) != [os.sched_getaffinity(0)] * len(found):
        assert time.monotonic() < give_up, found
        time.sleep(0.01)


def affinities() -> list[set[int]]:
    """The processors of each of this process's threads."""
    found = []
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            found.append(os.sched_getaffinity(int(thread.name)))
    return found


def test_a_weight_without_a_placement_is_xla_s():
    text = jax.jit(lambda x, w: einsum("...d,df->...f", x, w)).lower(jnp.ones((4, 8)), jnp.ones((8, 8))).as_text()
    assert "dot_general" in text and "custom_call" not in text


def attention_arguments(head_dim, block_size, group, dtype, kv_heads=2):
    """Two decodes, a short chunk, one that fills several tiles after a prefix, and padding; NaN in unused blocks."""
    rng = np.random.default_rng(head_dim)
    q_lens, kv_lens = np.array([1, 1, 3, 150, 0]), np.array([1, 131, 70, 333, 9])
    per_seq = -(-int(kv_lens.max()) // block_size)
    tables = rng.permutation(5 * per_seq + 3)[: 5 * per_seq].reshape(5, per_seq)
    pool = kv_shape(5 * per_seq + 3, block_size, kv_heads, head_dim, platform="cpu")
    pool = np.full(pool, np.nan, np.float32)
    for row in range(4):
        for position in range(kv_lens[row] - q_lens[row]):
            cell = pool[tables[row, position // block_size], :, :, position % block_size]
            cell[:] = rng.normal(size=cell.shape)
    q = rng.normal(size=(160, kv_heads * group, head_dim))
    k, v = rng.normal(size=(2, 160, kv_heads, head_dim))
    for x in (q, k, v):
        x[155:] = np.nan
    ints = (tables, np.cumsum([0, *q_lens]), kv_lens, [2, 4])
    return [*(jnp.asarray(x, dtype) for x in (q, k, v, pool)), PagedBatch(*(jnp.asarray(x, jnp.int32) for x in ints))]


@needs_library
@pytest.mark.parametrize(
    ("head_dim", "block_size", "group", "dtype", "options"),
    [
        (64, 32, 2, np.float32, {}),
        (64, 16, 2, jnp.bfloat16, {}),
        (80, 256, 1, np.float32, {}),
        (96, 20, 3, np.float32, {"sliding_window": 50}),
        (128, 128, 8, np.float32, {"soft_cap": 5.0}),
        (256, 16, 4, jnp.bfloat16, {"sliding_window": 33, "soft_cap": 5.0}),
        (64, 64, 71, np.float32, {}),
        (40, 32, 5, np.float32, {"sinks": jnp.linspace(-3, 4, 10)}),
        (64, 32, 1, np.float32, {"causal": False}),
        (64, 16, 3, jnp.bfloat16, {"causal": False, "sliding_window": 65}),
        (128, 32, 4, np.float32, {"kv_scales": SCALES}),
        (64, 16, 6, jnp.bfloat16, {"kv_scales": SCALES, "sinks": jnp.linspace(-3, 4, 12), "soft_cap": 5.0}),
    ],
)
def test_attention_at_real_sizes(head_dim, block_size, group, dtype, options):
    arguments = attention_arguments(head_dim, block_size, group, dtype)
    if "kv_scales" in options:
        stored = quantise(arguments[3], SCALES[None, :, :, None, None], jnp.int8)
        arguments[3] = jnp.where(jnp.isnan(arguments[3]), jnp.int8(77), stored)
    op = partial(ragged_paged_attention, scale=head_dim**-0.5, **options)
    results = [jax.jit(partial(op, implementation=name))(*arguments) for name in ("native", "reference")]
    (out, pool), (want, want_pool) = (tuple(np.asarray(x).astype(np.float32) for x in result) for result in results)
    np.testing.assert_allclose(out[:155], want[:155], atol=TOLERANCE[dtype], rtol=1e-2)
    np.testing.assert_array_equal(pool, want_pool)
    assert (out[155:] == 0).all()


@needs_library
@pytest.mark.parametrize(
    ("which", "value"), [("block_tables", 10**6), ("cu_q_lens", 161), ("kv_lens", 10**6), ("distribution", 6)]
)
def test_what_points_outside_of_the_arrays_is_an_error(which, value):
    *arrays, batch = attention_arguments(16, 32, 2, np.float32)
    batch = batch._replace(**{which: jnp.full_like(getattr(batch, which), value)})
    with pytest.raises(jax.errors.JaxRuntimeError, match="out of range"):
        jax.block_until_ready(ragged_paged_attention(*arrays, batch, implementation="native", scale=1.0))


def test_a_library_of_other_sources_or_another_jaxlib_is_not_loaded(monkeypatch, tmp_path):
    here = build.library("1.2.3")
    assert build.library("1.2.3") == here != build.library("1.2.4")
    shutil.copytree(build.HERE, tmp_path, dirs_exist_ok=True)
    monkeypatch.setattr(build, "HERE", tmp_path)
    assert build.library("1.2.3").name == here.name
    (tmp_path / "gemm.h").write_text("")
    assert build.library("1.2.3").name != here.name


@pytest.mark.skipif(not shutil.which("g++"), reason="no g++")
def test_a_compiler_that_knows_no_amx_builds_what_it_can(tmp_path):
    assert build._accepted(["g++"], ["-O1"]) == ["-O1"] and build._accepted(["g++"], ["-mno-such-set"]) == []
    output = tmp_path / "amx.o"
    subprocess.run(["g++", "-std=c++17", "-c", str(build.HERE / "amx.cc"), "-o", str(output)], check=True)
    assert b"amx_kernels" in output.read_bytes()


def test_what_is_built_is_not_built_again(monkeypatch, capsys):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build.main() == 0
    assert str(build.library(importlib.metadata.version("jaxlib"))) in capsys.readouterr().out


def test_without_a_compiler_the_build_says_why(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(build, "library", lambda _: tmp_path / "none.so")
    assert build.main() == 1
    error = capsys.readouterr().err
    assert "not built" in error and "no-such-compiler" in error and error.count("\n") == 1


CROSS = "aarch64-linux-gnu-g++"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which(CROSS) is None, reason=f"there is no {CROSS}")
@pytest.mark.parametrize("flags", [[], ["-march=armv8.2-a+dotprod"], ["-march=armv8.2-a+dotprod+i8mm+bf16"]])
def test_kernels_for_arm_compile(flags):
    names = ["-DJAXLLM_ISA=arm", "-DJAXLLM_TABLE=kArm", '-DJAXLLM_ISA_NAME="arm"']
    command = [
        CROSS,
        *build.FLAGS,
        "-O0",
        "-Werror",
        *flags,
        *names,
        "-c",
        str(build.HERE / "kernels.cc"),
        "-o",
        os.devnull,
    ]
    subprocess.run(command, check=True, timeout=300)
