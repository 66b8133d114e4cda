"""What the compiler's tuning of products takes beside a full KV pool: time, memory, and whether it works at all."""

import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.on_gpu.child import Recorder
from benchmarks.on_gpu.engines import few_executables, memory_stats, open_dummy, small_model
from jaxllm.sampling_params import SamplingParams

MODEL, TOKENS, TUNED = "llama-3.1-8b", (1, 64, 2048), (64, 2048)
SMALL_TOKENS, SMALL_TUNED = (1, 8), (8,)
UNTUNED = {"xla_gpu_autotune_level": 0}


def run(record: Recorder, small: bool) -> str:
    tokens = SMALL_TOKENS if small else TOKENS
    with tempfile.TemporaryDirectory() as directory:
        model = small_model(Path(directory)) if small else MODEL
        options: dict[str, Any] = {"num_blocks": 8, "max_model_len": 32} if small else {"max_model_len": 8192}
        with few_executables(tokens, compiled=tokens[:1]) as jobs, open_dummy(model, tokens, **options) as llm:
            params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, detokenize=False)
            llm.generate([{"prompt_token_ids": [1]}], params, use_tqdm=False)  # makes the pool
            record("memory_before", memory_stats())
            rows: dict[int, dict[str, Any]] = {}
            for num_tokens in SMALL_TUNED if small else TUNED:
                rows[num_tokens] = row = {}
                for name, given in (("untuned", UNTUNED), ("tuned", {})):  # the last fills the tuner's own cache
                    row[name] = _compile(jobs["step", num_tokens], given)
                    record("steps", rows)
            llm.generate([{"prompt_token_ids": [1]}], params, use_tqdm=False)  # the engine goes on
    failed = [f"{n} {name}" for n, row in rows.items() for name, found in row.items() if "error" in found]
    seconds = {
        n: f"{row['tuned']['seconds']:.0f} s, {row['untuned']['seconds']:.0f} untuned" for n, row in rows.items()
    }
    return f"to compile a step beside a full pool: {seconds}" + (f"; FAILED: {failed}" if failed else "")


def _compile(job: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Seconds of lowering and compiling, bytes at most in use so far; the error, if the compiler gives up: that is a
    result."""
    start = time.perf_counter()
    lowered = job()
    lowered_at, result = time.perf_counter(), {}
    try:
        compiled = lowered.compile(compiler_options=options)
    except Exception as error:  # noqa: BLE001 - out of memory, most likely, which is what is asked here
        result["error"] = " ".join(str(error).split())[:300]
    else:
        result["temp_bytes"] = compiled.memory_analysis().temp_size_in_bytes
    seconds = time.perf_counter() - lowered_at
    return {"lower_s": lowered_at - start, "seconds": seconds, "memory": memory_stats()} | result
