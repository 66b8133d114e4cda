"""Output tokens per second over whole workloads whose requests are submitted at once.

Each repeat runs the same ids, on an engine warmed up with a workload of another seed. The prefix cache is emptied
before each run, so that hits come from the run itself: prefixes that its requests share, and prompts of requests for
several completions. `--no-prefix-caching` disables these too.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tqdm import tqdm

from jaxllm.bench import report, workload
from jaxllm.bench.options import open_llm
from jaxllm.bench.workload import WorkloadRequest
from jaxllm.errors import JaxLLMError
from jaxllm.sampling_params import SamplingParams

WARM_UP_SEED = 99  # added to the workload's
_COLUMNS = (
    ("requests", "requests", "d"),
    ("prompt_tokens", "prompt", "d"),
    ("output_tokens", "output", "d"),
    ("wall_s", "wall s", ".3f"),
    ("best_wall_s", "best s", ".3f"),
    ("output_tokens_per_s", "output/s", ".1f"),
    ("best_output_tokens_per_s", "best/s", ".1f"),
    ("total_tokens_per_s", "total/s", ".1f"),
    ("cached_tokens", "cached", "d"),
    ("preemptions", "preempted", "d"),
)


class MeasuredRun(NamedTuple):
    """One run of a workload."""

    wall_s: float
    cached_tokens: int  # of prompts, counted for each completion
    preemptions: int


def run(
    model: dict[str, Any], *, kinds: Sequence[str], scale: float, repeats: int, seed: int, vocab: int | None
) -> dict[str, Any]:
    """The report. `model` are the arguments of `open_llm`; `vocab=None` is the model's, at most `MAX_VOCAB`."""
    workload.check_kinds(kinds)
    with open_llm(**model) as llm:
        vocab = min(llm.engine.vocab, workload.MAX_VOCAB) if vocab is None else vocab
        workload.check_vocab(vocab, llm.engine.vocab)
        work = {
            (kind, s): workload.make(kind, vocab=vocab, seed=s, scale=scale)
            for kind in kinds
            for s in (seed, seed + WARM_UP_SEED)
        }
        for (kind, _), requests in work.items():
            _check_fits(llm, kind, requests)
        llm.wait_compiled()
        with tqdm(total=len(kinds) * (1 + repeats), desc="measuring", unit="run", disable=None, leave=False) as bar:
            results = [
                measure(llm, kind, work[kind, seed], work[kind, seed + WARM_UP_SEED], repeats, tick=bar.update)
                for kind in kinds
            ]
        about = report.about(llm, model=model.get("model"), dummy_weights=model["dummy_weights"])
    options = {
        "kinds": list(kinds),
        "scale": scale,
        "repeats": repeats,
        "seed": seed,
        "vocab": vocab,
        "prefix_caching": about["engine"]["enable_prefix_caching"],
        "prefix_cache_at_start_of_run": "empty",
    }
    return {"benchmark": "throughput", **about, "options": options, "results": results}


def measure(
    llm: Any,
    kind: str,
    requests: Sequence[WorkloadRequest],
    warm_up: Sequence[WorkloadRequest],
    repeats: int,
    *,
    tick: Callable[[], Any] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    """A row of the table: figures of the run of median wall time (the slower of two), and the best."""
    _run_once(llm, warm_up, clock)
    tick()
    runs = []
    for _ in range(repeats):
        runs.append(_run_once(llm, requests, clock))
        tick()
    runs.sort()
    median, best = runs[len(runs) // 2], runs[0]
    prompt_tokens = sum(len(request.prompt_token_ids) for request in requests)
    output_tokens = sum(request.max_tokens * request.n for request in requests)
    return {
        "kind": kind,
        "requests": len(requests),
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "wall_s": median.wall_s,
        "best_wall_s": best.wall_s,
        "output_tokens_per_s": output_tokens / median.wall_s,
        "best_output_tokens_per_s": output_tokens / best.wall_s,
        "total_tokens_per_s": (prompt_tokens + output_tokens) / median.wall_s,
        "cached_tokens": median.cached_tokens,
        "preemptions": median.preemptions,
    }


def _run_once(llm: Any, requests: Sequence[WorkloadRequest], clock: Callable[[], float]) -> MeasuredRun:
    prompts = [{"prompt_token_ids": request.prompt_token_ids} for request in requests]
    params = [
        SamplingParams(
            n=request.n,
            temperature=1.0 if request.n > 1 or request.is_apart else 0.0,
            max_tokens=request.max_tokens,
            ignore_eos=True,
            detokenize=False,
            beam_width=request.beam_width,
            skip_reading_prefix_cache=request.is_apart or None,
        )
        for request in requests
    ]
    llm.engine.scheduler.forget_keys()
    before = llm.stats()
    start = clock()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    wall_s = clock() - start
    after = llm.stats()
    for request, output in zip(requests, outputs, strict=True):
        check_lengths_made([output], request.max_tokens, request.n)
    return MeasuredRun(
        wall_s, after.num_cached_tokens - before.num_cached_tokens, after.num_preemptions - before.num_preemptions
    )


def check_lengths_made(outputs: Sequence[Any], num_tokens: int, n: int = 1) -> None:
    """Raises JaxLLMError unless each request made `n` completions of `num_tokens`."""
    for output in outputs:
        lengths = [len(completion.token_ids) for completion in output.outputs]
        if lengths != [num_tokens] * n:
            raise JaxLLMError(f"a request for {n} x {num_tokens} tokens made {lengths}: {output.error}")


def _check_fits(llm: Any, kind: str, requests: Sequence[WorkloadRequest]) -> None:
    longest = max(requests, key=lambda request: len(request.prompt_token_ids) + request.max_tokens)
    prompt_len = len(longest.prompt_token_ids)
    workload.check_lengths(f"workload {kind}", prompt_len, longest.max_tokens, llm.engine.config.max_model_len)


def table(results: dict[str, Any]) -> str:
    lines = [report.heading(results), f"{'kind':<8}" + "".join(f"{title:>10}" for _, title, _ in _COLUMNS)]
    lines += [
        f"{row['kind']:<8}" + "".join(f"{row[name]:>10{form}}" for name, _, form in _COLUMNS)
        for row in results["results"]
    ]
    repeats = results["options"]["repeats"]
    return "\n".join([*lines, f"tokens, and seconds of whole runs: median and best of {repeats}"])
