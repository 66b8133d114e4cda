"""What a request feels of executables that compile behind it: one alone, again and again, and many at once, from the
moment an engine without any cache is ready; and the same once all are there."""

import statistics
import time
from typing import Any

from tqdm import tqdm

from benchmarks.runs import table_lines
from jaxllm.bench import report, workload
from jaxllm.bench.options import open_llm
from jaxllm.sampling_params import SamplingParams

_COLUMNS = (
    ("alone_tokens_per_s", "alone, tokens/s", ".1f"),
    ("slowest_tokens_per_s", "slowest", ".1f"),
    ("first_token_s", "first token s", ".3f"),
    ("many_s", "many, s", ".2f"),
    ("compiled", "compiled by then", "d"),
)
_INPUT_LEN = 8  # tokens of a lone request's prompt


def run(
    model: dict[str, Any], *, requests: int, input_len: int, output_len: int, repeats: int, seconds: int, seed: int
) -> dict[str, Any]:
    """The report: medians over `repeats` engines of each. A lone request is repeated for `seconds`."""
    phases: dict[str, list[dict[str, Any]]] = {"while compiling": [], "compiled": []}
    with tqdm(total=2 * repeats, desc="measuring", unit="engine", disable=None, leave=False) as bar:
        for _ in range(repeats):
            with _open(model) as llm:
                lone = _alone(llm, output_len, seconds)
                about = report.about(llm, model=model.get("model"), dummy_weights=model["dummy_weights"])
                compiled = llm.stats().num_compiled
                llm.wait_compiled()
                phases["compiled"].append(_alone(llm, output_len, seconds) | {"compiled": llm.stats().num_compiled})
            bar.update()
            with _open(model) as llm:
                vocab = min(llm.engine.vocab, workload.MAX_VOCAB)
                # Other prompts each time, of which nothing is in the prefix cache.
                prompts = [workload.prompts(requests, input_len, vocab=vocab, seed=seed + i) for i in range(4)]
                many = _many(llm, prompts[0], output_len)
                llm.wait_compiled()
                phases["compiled"][-1]["many_s"] = statistics.median(_many(llm, p, output_len) for p in prompts[1:])
            phases["while compiling"].append(lone | {"many_s": many, "compiled": compiled})
            bar.update()
    rows = [
        {"phase": phase} | {name: statistics.median_low(run[name] for run in runs) for name in runs[0]}
        for phase, runs in phases.items()
    ]
    options = {"requests": requests, "input_len": input_len, "output_len": output_len, "repeats": repeats}
    return {"benchmark": "compiling", **about, "options": options | {"seconds": seconds, "seed": seed}, "results": rows}


def _open(model: dict[str, Any]) -> Any:
    return open_llm(**model | {"compilation_cache": False})


def _alone(llm: Any, output_len: int, seconds: float) -> dict[str, float]:
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
    prompt, firsts, speeds, end = list(range(1, 1 + _INPUT_LEN)), [], [], time.perf_counter() + seconds
    start = time.perf_counter()
    while start < end:
        updates = llm.stream([prompt], params)
        next(updates)
        firsts.append(time.perf_counter() - start)
        for _ in updates:
            pass
        now = time.perf_counter()
        speeds.append(output_len / (now - start))
        start = now
    mean = len(speeds) / sum(1 / speed for speed in speeds)  # all tokens over all seconds
    return {"alone_tokens_per_s": mean, "slowest_tokens_per_s": min(speeds), "first_token_s": firsts[0]}


def _many(llm: Any, prompts: list[list[int]], output_len: int) -> float:
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
    start = time.perf_counter()
    llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return time.perf_counter() - start


def table(results: dict[str, Any]) -> str:
    options = results["options"]
    lines = [
        report.heading(results),
        f"alone: {_INPUT_LEN} + {options['output_len']} tokens, for {options['seconds']} s; many: "
        f"{options['requests']} requests of {options['input_len']} + {options['output_len']}",
        *table_lines(results["results"], "phase", _COLUMNS, 17),
        f"medians of {options['repeats']} engines",
    ]
    return "\n".join(lines)
