"""Engines of random models with few executables, decoding at a steady pace."""

import json
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import jax

from benchmarks.on_gpu.child import Recorder
from jaxllm.aot.prepare import find_model
from jaxllm.bench import workload
from jaxllm.bench.options import open_llm
from jaxllm.engine.device import encoder, lowering
from jaxllm.engine.device.lowering import Lowering
from jaxllm.errors import JaxLLMError
from jaxllm.llm import LLM
from jaxllm.sampling_params import SamplingParams

SMALL_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
_OTHERS = ("rules", "prompt_logprobs", "copy", "swap_in", "swap_out")  # no greedy request needs them
_FULL = ("logits", "alter", "sample_full")
Jobs = dict[Hashable, Callable[[], jax.stages.Lowered]]


@contextmanager
def few_executables(
    tokens: Sequence[int], *, compiled: Sequence[int] | None = None, full_sampler: bool = False
) -> Iterator[Jobs]:
    """Engines made within have steps of `tokens` alone, and of those only `compiled` (None: all) are compiled, with the
    full sampler or the plain one: tuning a whole plan takes minutes. Yields the plan: name -> lowering."""
    whole, all_jobs = Lowering.jobs, {}

    def is_wanted(name: Hashable) -> bool:
        kind, *rest = name if isinstance(name, tuple) else (name,)
        if kind == "step":
            return compiled is None or rest[0] in compiled
        return full_sampler or kind not in _OTHERS + _FULL

    def jobs(self: Lowering) -> Jobs:
        all_jobs.update(whole(self))
        return {name: job for name, job in all_jobs.items() if is_wanted(name)}

    def ladder(most: int, least: int = 1, **_: bool) -> tuple[int, ...]:
        return tuple(sorted({min(max(size, least), most) for size in tokens}))

    with (
        mock.patch.multiple(encoder, token_ladder=ladder, sample_ladder=ladder),
        mock.patch.multiple(lowering, token_ladder=ladder, sample_ladder=ladder),
        mock.patch.object(Lowering, "jobs", jobs),
    ):
        yield all_jobs


def small_model(directory: Path) -> Path:
    """A directory with the configuration of a tiny model."""
    (directory / "config.json").write_text(json.dumps(SMALL_CONFIG))
    return directory


def open_dummy(model: Path | str, tokens: Sequence[int], **options: Any) -> LLM:
    """An engine of the model, of which the configuration is enough, or the name of one that `jaxllm.aot` has."""
    path = model if isinstance(model, Path) else find_model(model)
    return open_llm(
        dummy_weights=True,
        model=path,
        max_num_batched_tokens=tokens[-1],
        max_num_seqs=options.pop("max_num_seqs", min(256, tokens[-1])),
        enable_prefix_caching=False,
        **options,
    )


def memory_stats() -> dict[str, int]:
    """Bytes in use and the most there were, of the device; nothing on a CPU."""
    stats = jax.devices()[0].memory_stats() or {}
    return {name: stats[name] for name in ("bytes_in_use", "peak_bytes_in_use", "bytes_limit") if name in stats}


@dataclass
class Pace:
    """Of `steps` decode steps: the mean wall time of one, and medians of what the host does in it and waits for."""

    step_ms: float
    host_ms: float
    wait_ms: float
    steps: int
    context: float  # tokens of a sequence, the mean over the steps


@contextmanager
def decoding(llm: LLM, batch: int, context: int, steps: int) -> Iterator[Callable[[int], Pace]]:
    """`batch` requests whose prompts of `context` tokens are computed, and who go on for at least `steps` more; yields
    what takes the pace of some of them. Raises `JaxLLMError` if a request ends before."""
    engine = llm.engine
    filling = _filling(llm, batch, context)
    room = engine.config.max_model_len - context
    params = SamplingParams(
        temperature=0.0, max_tokens=min(room, 2 * filling + steps + 64), ignore_eos=True, detokenize=False
    )
    ids = [f"decoding-{i}" for i in range(batch)]
    for name, prompt in zip(ids, workload.prompts(batch, context, vocab=min(engine.vocab, 8000), seed=0), strict=True):
        engine.add(prompt, params, request_id=name)
    try:
        _fill(engine, batch, 8 * filling)
        yield lambda count: _pace(engine, batch, context, count)
    finally:
        for name in ids:
            engine.abort(name)
        while engine.has_work():
            engine.step()


def blocks_needed(llm: LLM, batch: int, context: int, steps: int) -> int:
    """By `decoding`: of the prompts, and of what the first requests write until the last has done `steps`."""
    longest = context + _filling(llm, batch, context) + steps
    return batch * -(-longest // llm.engine.config.block_size)


def _filling(llm: LLM, batch: int, context: int) -> int:
    """Steps until all prompts are computed, and some more."""
    return -(-batch * context // max(1, llm.engine.config.max_num_batched_tokens - batch)) + 16


def _fill(engine: Any, batch: int, most_steps: int) -> None:
    """Steps until nothing but decodes has run for a while."""
    steady, before = 0, engine.stats().num_step_tokens
    for _ in range(most_steps):
        _step(engine)
        now = engine.stats()
        steady = steady + 1 if now.num_step_tokens - before == batch and now.num_running == batch else 0
        before = now.num_step_tokens
        if steady >= 4:
            return
    raise JaxLLMError(f"{batch} requests are not all decoding after {most_steps} steps: {engine.stats()}")


def _step(engine: Any) -> None:
    if finished := engine.step():
        raise JaxLLMError(f"request {finished[0].request_id} ended while it was measured: {finished[0].error}")


def _pace(engine: Any, batch: int, context: int, steps: int) -> Pace:
    collect, waits, times = engine.runner.collect, [], []

    def timed_collect(handle: Any) -> Any:
        start = time.perf_counter()
        result = collect(handle)
        waits.append(time.perf_counter() - start)
        return result

    begin = engine.stats()
    with mock.patch.object(engine.runner, "collect", timed_collect):
        start = time.perf_counter()
        for _ in range(steps):
            before = time.perf_counter()
            _step(engine)
            times.append(time.perf_counter() - before - waits[-1])
        wall = time.perf_counter() - start
    end = engine.stats()
    if end.num_step_tokens - begin.num_step_tokens != steps * batch:
        raise JaxLLMError(f"{steps} steps of {batch} made {end.num_step_tokens - begin.num_step_tokens} tokens")
    used = (begin.blocks_used + end.blocks_used) * begin.block_size - begin.wasted_slots - end.wasted_slots
    return Pace(
        step_ms=wall / steps * 1e3,
        host_ms=statistics.median(times) * 1e3,
        wait_ms=statistics.median(waits) * 1e3,
        steps=steps,
        context=used / 2 / batch if used else context,
    )


def prefill_s(llm: LLM, length: int, repeats: int) -> list[float]:
    """Seconds from a request of `length` tokens to its first token, on an idle engine, once untimed and then
    `repeats` times."""
    params, times = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False), []
    for prompt in workload.prompts(1 + repeats, length, vocab=min(llm.engine.vocab, 8000), seed=1):
        start = time.perf_counter()
        (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        times.append(time.perf_counter() - start)
        if output.error is not None:
            raise JaxLLMError(f"a prompt of {length} tokens failed: {output.error}")
    return times[1:]


def record_start(record: Recorder, llm: LLM, seconds: float) -> None:
    """What starting took; waits for the rest of the plan first."""
    start = time.perf_counter()
    llm.wait_compiled()
    stats = llm.stats()
    record(
        "start",
        {
            "first_s": seconds,
            "compiled_s": seconds + time.perf_counter() - start,
            "compile_s": stats.compile_s,
            "executables": stats.num_compiled,
            "num_blocks": stats.num_blocks,
            "block_size": stats.block_size,
            "memory": memory_stats(),
        },
    )
