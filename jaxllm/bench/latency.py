"""Latency: time to the first token, between tokens, and to the last, for a batch of equal requests.

The requests of a batch are submitted together, which starts the clock. Each repeat runs the same ids; the prefix cache
is emptied before it, so that the first token includes the whole prompt.
"""

import time
from collections.abc import Callable
from contextlib import closing
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from jaxllm.bench import report, workload
from jaxllm.bench.options import open_llm
from jaxllm.errors import JaxLLMError
from jaxllm.sampling_params import SamplingParams

_ROWS = (("ttft_ms", "first token"), ("itl_ms", "between tokens"), ("e2e_ms", "end to end"))
_QUANTILES = (("median", 50), ("p90", 90), ("p99", 99))


class Times(NamedTuple):
    """Seconds of one or several batches: one entry per request, or per pause."""

    first: list[float]
    pauses: list[float]  # between two updates of a request
    whole: list[float]


def run(
    model: dict[str, Any], *, batch_size: int, input_len: int, output_len: int, repeats: int, seed: int
) -> dict[str, Any]:
    """The report. `model` are the arguments of `open_llm`."""
    with open_llm(**model) as llm:
        vocab = min(llm.engine.vocab, workload.MAX_VOCAB)
        workload.check_vocab(vocab, llm.engine.vocab)
        workload.check_lengths("each request", input_len, output_len, llm.engine.config.max_model_len)
        warm_up = workload.prompts(batch_size, input_len, vocab=vocab, seed=seed + 1)
        prompts = workload.prompts(batch_size, input_len, vocab=vocab, seed=seed)
        llm.wait_compiled()
        with tqdm(total=1 + repeats, desc="measuring", unit="run", disable=None, leave=False) as bar:
            stream_once(llm, warm_up, output_len)
            bar.update()
            runs = []
            for _ in range(repeats):
                runs.append(stream_once(llm, prompts, output_len))
                bar.update()
        about = report.about(llm, model=model.get("model"), dummy_weights=model["dummy_weights"])
    options = {
        "batch_size": batch_size,
        "input_len": input_len,
        "output_len": output_len,
        "repeats": repeats,
        "seed": seed,
        "vocab": vocab,
        "prefix_caching": about["engine"]["enable_prefix_caching"],
        "prefix_cache_at_start_of_run": "empty",
    }
    times = Times(*(sum(parts, []) for parts in zip(*runs, strict=True)))
    return {"benchmark": "latency", **about, "options": options, "results": summary(times)}


def stream_once(
    llm: Any, prompts: list[list[int]], output_len: int, clock: Callable[[], float] = time.perf_counter
) -> Times:
    """Streams one batch, greedy and without detokenizing."""
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False)
    arrivals: list[list[float]] = [[] for _ in prompts]
    num_tokens = [0] * len(prompts)
    llm.engine.scheduler.forget_keys()
    start = clock()
    with closing(llm.stream([{"prompt_token_ids": ids} for ids in prompts], params)) as updates:
        for index, output in updates:
            now = clock()
            length = len(output.outputs[0].token_ids)
            if length > num_tokens[index]:
                num_tokens[index] = length
                arrivals[index].append(now)
            if output.error is not None:
                raise JaxLLMError(f"a request of the batch failed: {output.error}")
    if num_tokens != [output_len] * len(prompts):
        raise JaxLLMError(f"requests for {output_len} tokens made {num_tokens}")
    return Times(
        first=[times[0] - start for times in arrivals],
        pauses=[later - sooner for times in arrivals for sooner, later in zip(times, times[1:], strict=False)],
        whole=[times[-1] - start for times in arrivals],
    )


def summary(times: Times) -> dict[str, Any]:
    """Median, p90 and p99 in ms of each list, interpolated; None for an empty list."""
    return {name: _quantiles(seconds) for (name, _), seconds in zip(_ROWS, times, strict=True)}


def _quantiles(seconds: list[float]) -> dict[str, Any] | None:
    if not seconds:
        return None
    values = np.percentile(np.array(seconds) * 1e3, [percent for _, percent in _QUANTILES])
    named = {name: float(value) for (name, _), value in zip(_QUANTILES, values, strict=True)}
    return named | {"samples": len(seconds)}


def table(results: dict[str, Any]) -> str:
    options = results["options"]
    lines = [
        report.heading(results),
        f"{options['batch_size']} at a time, {options['input_len']} tokens in, {options['output_len']} out, "
        f"{options['repeats']} repeats; ms",
        f"{'':<16}" + "".join(f"{name:>10}" for name, _ in _QUANTILES) + f"{'samples':>10}",
    ]
    for name, title in _ROWS:
        row = results["results"][name]
        cells = [f"{row[quantile]:>10.2f}" for quantile, _ in _QUANTILES] if row else [f"{'-':>10}"] * len(_QUANTILES)
        lines.append(f"{title:<16}" + "".join(cells) + f"{row['samples'] if row else 0:>10}")
    return "\n".join(lines)
