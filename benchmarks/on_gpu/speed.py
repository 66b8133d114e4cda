"""The engine's own speed on dummy models: decode steps at several batches, prompts, and how long the device waits."""

import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.on_gpu import trace
from benchmarks.on_gpu.child import Recorder
from benchmarks.on_gpu.engines import (
    blocks_needed,
    decoding,
    few_executables,
    memory_stats,
    open_dummy,
    prefill_s,
    record_start,
    small_model,
)
from benchmarks.on_gpu.floors import sizes_of
from jaxllm.aot.prepare import find_model
from jaxllm.checkpoint.config import read_config
from jaxllm.llm import LLM

TOKENS = (1, 8, 64, 256, 2048)  # of the steps that are compiled
DECODE = 1024, 64, 24  # tokens of a prompt, steps that are timed, steps that are traced
BATCHES, PROMPTS, REPEATS = (1, 8, 64, 256), (2048, 8192, 32768), 3
SMALL_TOKENS, SMALL_DECODE = (8, 32), (16, 4, 2)
SMALL_BATCHES, SMALL_PROMPTS = (1, 8), (40,)
OUTPUT_ROOM = 1024  # tokens of context beside the longest prompt


def run_8b(record: Recorder, small: bool) -> str:
    return run(record, "llama-3.1-8b", small)


def run_06b(record: Recorder, small: bool) -> str:
    return run(record, "qwen3-0.6b", small)


def run(record: Recorder, model: str, small: bool) -> str:
    with tempfile.TemporaryDirectory() as directory:
        path = small_model(Path(directory)) if small else find_model(model)
        record("sizes", asdict(sizes_of(read_config(path, "float32" if small else "bfloat16").cfg)))
        prompts = SMALL_PROMPTS if small else PROMPTS
        tokens, start = SMALL_TOKENS if small else TOKENS, time.perf_counter()
        options: dict[str, Any] = {"num_blocks": 128, "block_size": 8} if small else {}
        with (
            few_executables(tokens),
            open_dummy(path, tokens, max_model_len=prompts[-1] + (64 if small else OUTPUT_ROOM), **options) as llm,
        ):
            record_start(record, llm, time.perf_counter() - start)
            decode = _decodes(record, llm, small)
            prefill = {}
            for length in prompts:
                prefill[length] = median(prefill_s(llm, length, 1 if small else REPEATS)) * 1e3
                record("prefill", prefill)
            record("memory", memory_stats())
    decoded = ", ".join(f"{batch}: {row['step_ms']:.2f}" for batch, row in decode.items() if "step_ms" in row)
    return f"decode ms by batch {decoded}; prompt ms " + ", ".join(f"{n}: {ms:.1f}" for n, ms in prefill.items())


def _decodes(record: Recorder, llm: LLM, small: bool) -> dict[int, dict[str, Any]]:
    context, steps, traced = SMALL_DECODE if small else DECODE
    rows: dict[int, dict[str, Any]] = {}
    for batch in SMALL_BATCHES if small else BATCHES:
        need = blocks_needed(llm, batch, context, steps + 2 * traced)
        if need > llm.engine.config.num_blocks:
            rows[batch] = {"skipped": f"needs {need} blocks of the {llm.engine.config.num_blocks} that fit"}
        else:
            rows[batch] = _decode(llm, batch, context, steps, traced)
        record("decode", rows)
    return rows


def _decode(llm: LLM, batch: int, context: int, steps: int, traced: int) -> dict[str, Any]:
    with decoding(llm, batch, context, steps + 2 * traced) as pace:
        row: dict[str, Any] = asdict(pace(steps))
        row["tokens_per_s"] = batch / row["step_ms"] * 1e3
        data = trace.profile(lambda: pace(traced))
        busy = trace.device_busy(data)
        row["busy"] = None if busy is None else asdict(busy) | {"kernels_per_step": busy.kernels / traced}
        row["driver_calls"] = trace.driver_calls(data, traced)
    return row
