"""Ragged paged attention on the device: small batches against numpy in float64, large ones against the reference."""

from functools import partial
from typing import Any

import jax
import numpy as np

from benchmarks import kernels
from benchmarks.attention_cases import Batch, Case
from benchmarks.kernels import WrongResultError
from benchmarks.on_gpu.checks import Checks, compile_all
from benchmarks.on_gpu.child import Recorder
from jaxllm.pallas_kernels.dispatch import Placement
from jaxllm.pallas_kernels.paged_attention import api, ragged_paged_attention

_8B: dict[str, Any] = dict(heads=8, kv_heads=2, head_dim=128, block_size=32, dtype="bfloat16")  # a quarter of its heads
CASES = {
    "decode 1": Case(1, 1, 32, 8, 128, 32, "bfloat16", blocks_per_seq=24),
    "decode 8": Case(8, 8, 32, 8, 128, 32, "bfloat16", blocks_per_seq=16),
    "decode 64": Case(64, 64, **_8B, blocks_per_seq=8),
    "decode 256": Case(256, 256, 4, 1, 128, 32, "bfloat16", blocks_per_seq=3),
    "decode of Qwen3-0.6B": Case(64, 64, 16, 8, 128, 32, "bfloat16"),
    "few tokens": Case(30, 6, **_8B, blocks_per_seq=12),
    "chunks": Case(256, 4, **_8B, blocks_per_seq=12),
    "mixed": Case(224, 40, **_8B, blocks_per_seq=8),
    "mixed, wide tiles": Case(1024, 8, 32, 2, 64, 32, "bfloat16", blocks_per_seq=6),
    "window, decode": Case(48, 48, **_8B, sliding_window=100, blocks_per_seq=8),
    "window, mixed": Case(224, 12, **_8B, sliding_window=77, blocks_per_seq=8),
    "window of one": Case(80, 6, **_8B, sliding_window=1),
    "cap": Case(160, 10, **_8B, soft_cap=1.5),
    "sinks, decode": Case(16, 16, **_8B, sinks=True),
    "sinks, cap, window": Case(160, 10, **_8B, soft_cap=1.5, sinks=True, sliding_window=50),
    "head_dim 64": Case(128, 10, 8, 2, 64, 16, "bfloat16", blocks_per_seq=12),
    "head_dim 80": Case(128, 10, 8, 8, 80, 32, "bfloat16"),
    "head_dim 96": Case(128, 10, 6, 2, 96, 64, "bfloat16"),
    "head_dim 256": Case(128, 10, 8, 4, 256, 32, "bfloat16"),
    "head_dim 256, decode": Case(32, 32, 8, 4, 256, 32, "bfloat16"),
    "blocks of 16": Case(160, 10, 8, 2, 128, 16, "bfloat16", blocks_per_seq=16),
    "blocks of 128": Case(160, 10, 8, 2, 128, 128, "bfloat16"),
    "blocks of 256": Case(160, 10, 8, 2, 128, 256, "bfloat16", blocks_per_seq=3),
    "groups of 5": Case(160, 10, 10, 2, 128, 32, "bfloat16"),
    "float32, decode": Case(40, 40, 8, 2, 128, 32, sinks=True),
    "float32, mixed": Case(160, 10, 8, 2, 128, 32, sliding_window=90),
    "float32, head_dim 256": Case(64, 6, 4, 2, 256, 32),
    "int8, decode": Case(40, 40, **_8B, pool_dtype="int8"),
    "int8, mixed": Case(160, 10, **_8B, pool_dtype="int8", soft_cap=1.5),
    "float8, decode": Case(40, 40, **_8B, pool_dtype="float8_e4m3fn"),
    "float8, mixed": Case(160, 10, **_8B, pool_dtype="float8_e4m3fn"),
}
SMALL_CASES = {
    "decode": Case(4, 4, 4, 2, dtype="bfloat16"),
    "mixed": Case(24, 5, 4, 2, sliding_window=19, soft_cap=1.5),
}
RUNS = 3  # of the same batch: an error that moves is a race
_32K = 32 * 1024
# Tokens of the step and of the whole sequences, and options, for sizes that numpy would take minutes for.
LARGE = {
    "decode 8x4k": ([1] * 8, [4096] * 8, {}),
    "decode 3 of 32k": ([1] * 3, [_32K, _32K - 7, 5000], {}),
    "decode 128 of many lengths": ([1] * 128, [1 + 37 * i for i in range(128)], {}),
    "prompt of 2k": ([2048], [2048], {}),
    "chunk of 2k after 6k": ([2048], [8192], {}),
    "decodes beside a chunk": ([1] * 63 + [1985], [1000 + 11 * i for i in range(63)] + [3000], {}),
    "window of 1k": ([1] * 31 + [900, 1100], [3000] * 31 + [900, 6000], {"sliding_window": 1024}),
}
SMALL_LARGE = {"decodes beside a chunk": ([1, 1, 20], [40, 3, 60], {})}


def run(record: Recorder, small: bool) -> str:
    checks, placement, platform = Checks(record), Placement.default(), jax.devices()[0].platform
    cases = SMALL_CASES if small else CASES
    batches = {name: [Batch(case, contents(case, seed), platform) for seed in (0, 1)] for name, case in cases.items()}
    record("implementations", {name: implementation(placement, case, batches[name][0]) for name, case in cases.items()})
    waits = compile_all({name: partial(lower, placement, cases[name], batches[name][0]) for name in cases})
    for name, wait in waits.items():
        checks.run(name, partial(check, placement, cases[name], batches[name], wait))
    model = kernels.Model(4, 2, 64, 16, "float32") if small else kernels.Model(32, 8, 128, 32, "bfloat16")
    for name, large in (SMALL_LARGE if small else LARGE).items():
        checks.run(name, partial(check_large, placement, model, *large))
    return checks.summary()


def contents(case: Case, seed: int) -> tuple[int, list[int], list[int], list[int], int]:
    """A batch of the case, as `Batch` takes it: with seed 0 all tokens and rows are used, otherwise about half."""
    rng = np.random.default_rng(seed)
    rows = case.seqs if seed == 0 else -(-case.seqs // 2)
    tokens = case.tokens if seed == 0 else max(rows, case.tokens // 2)
    decodes = rows if tokens == rows else rows // 2
    chunks = rows - decodes
    q_lens = [1] * decodes
    for left in range(chunks, 0, -1):
        q_lens.append(min(case.max_len, (tokens - sum(q_lens)) // left))
    kv_lens = [int(rng.integers(q_len, case.max_len + 1)) for q_len in q_lens]
    kv_lens[0], shared = case.max_len, [int(n) for n in rng.integers(0, 3, rows)]
    return decodes, q_lens, kv_lens, shared, seed


def implementation(placement: Placement, case: Case, batch: Batch) -> str:
    """Which serves a call of this case."""
    return api.OP.preferred_at(placement, *batch.arguments, **case.options, **batch.options)


def lower(placement: Placement, case: Case, batch: Batch) -> jax.stages.Lowered:
    op = partial(ragged_paged_attention, placement=placement, **case.options)
    return jax.jit(op).lower(*batch.arguments, **batch.options)


def check(placement: Placement, case: Case, batches: list[Batch], wait: Any) -> dict[str, Any]:
    """The largest error of all batches. Raises `WrongResultError` or `AssertionError`."""
    run, errors = wait(), []
    for batch in batches:
        errors.append(batch.check(run))
        again = [np.asarray(run(*batch.arguments, **batch.options)[0])[: sum(batch.q_lens)] for _ in range(RUNS)]
        if any(out.tobytes() != again[0].tobytes() for out in again):
            raise WrongResultError("the same batch gave several results")
    return {"error": max(errors), "dtype": case.dtype, "kernel": implementation(placement, case, batches[0])}


def check_large(
    placement: Placement, model: kernels.Model, q_lens: list[int], kv_lens: list[int], options: dict[str, Any]
) -> dict[str, Any]:
    some = kernels.arguments(model, [1], [model.block_size])
    kernel = api.OP.preferred_at(placement, *some, scale=1.0, **options)
    error, tolerance = kernels.check(model, kernel, q_lens, kv_lens, **options), kernels.TOLERANCE[model.dtype]
    if not error <= tolerance:
        raise WrongResultError(f"{kernel} differs by {error:.1e} from the reference, more than {tolerance:.0e}")
    return {"error": error, "dtype": model.dtype, "kernel": kernel}
