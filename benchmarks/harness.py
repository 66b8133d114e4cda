"""Multiple-choice questions of lm-evaluation-harness over an engine, beside its own Hugging Face back end, in float32
on a CPU: the back ends alone, on the requests that the harness makes of a question with four choices."""

import time
from collections.abc import Callable
from statistics import median_low
from typing import Any

import numpy as np

from benchmarks.runs import table_lines

_COLUMNS = (("wall_s", "s", ".2f"), ("cpu_s", "CPU s", ".2f"), ("ratio", "times as fast", ".2f"))
_NAMES = ("path", "name", "value", "items", "key", "data", "index", "size")


def run(*, model: str | None, questions: int, batch: int, threads: int, repeats: int) -> dict[str, Any]:
    """The report; medians of `repeats` runs, which take turns. `batch` is the Hugging Face back end's, `threads` are
    torch's. The prefix cache is emptied before each run of ours."""
    import torch
    from lm_eval.models.huggingface import HFLM

    from jaxllm import LLM
    from jaxllm.default_model import DEFAULT_MODEL
    from jaxllm.integrations.lm_eval import JaxLLM

    torch.set_num_threads(threads)
    path = str(model or DEFAULT_MODEL)
    back_ends: Any = (HFLM, JaxLLM)  # decorators hide what they take
    theirs = back_ends[0](pretrained=path, dtype="float32", device="cpu", batch_size=batch, max_length=1024)
    with LLM(path, dtype="float32", max_model_len=1024) as llm:
        llm.wait_compiled()
        ours = back_ends[1](llm)
        asked = _requests(questions)

        def engine() -> list[tuple[float, bool]]:
            llm.reset_prefix_cache()
            return ours.loglikelihood(asked, disable_tqdm=True)

        ways: dict[str, Callable[[], list[tuple[float, bool]]]] = {
            "jaxllm": engine,
            "Hugging Face": lambda: theirs.loglikelihood(asked, disable_tqdm=True),
        }
        first, second = (np.array(way()) for way in ways.values())
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for _ in range(repeats):
            for name, way in ways.items():
                start, cpu = time.perf_counter(), time.process_time()
                way()
                times[name].append((time.perf_counter() - start, time.process_time() - cpu))
    medians = {name: [median_low(each) for each in zip(*found, strict=True)] for name, found in times.items()}
    rows = [
        {"engine": name, "wall_s": wall, "cpu_s": cpu, "ratio": medians["Hugging Face"][0] / wall}
        for name, (wall, cpu) in medians.items()
    ]
    options = {"model": path, "questions": questions, "batch": batch, "threads": threads, "repeats": repeats}
    difference = float(np.abs(first[:, 0] - second[:, 0]).max())
    same = bool((first[:, 1] == second[:, 1]).all())
    return {
        "benchmark": "harness",
        "options": options,
        "largest_difference": difference,
        "same_greedy": same,
        "results": rows,
    }


def _requests(questions: int) -> list[Any]:
    from lm_eval.api.instance import Instance

    found = []
    for i in range(questions):
        name, other = _NAMES[i % len(_NAMES)], _NAMES[(i + 1 + i // len(_NAMES)) % len(_NAMES)]
        line = f"def get_{name}_{i}(self, {other}):\n    '''Returns the {name} of {other}.'''\n"
        for choice in (f" self.{name}", f" {other}", f" self._{name}[{other}]", " None"):
            found.append(Instance("loglikelihood", {}, (line * (1 + i % 3) + "    return", choice), len(found)))
    return found


def table(report: dict[str, Any]) -> str:
    """A line for each back end."""
    options, greedy = report["options"], "the same" if report["same_greedy"] else "not the same"
    lines = [
        f"{options['questions']} questions with four choices; batches of {options['batch']} and {options['threads']} "
        "threads of torch's",
        *table_lines(report["results"], "engine", _COLUMNS, 16),
        f"medians of {options['repeats']} runs; the largest difference of a log-likelihood is "
        f"{report['largest_difference']:.1e} nats, greedy choices are {greedy}",
    ]
    return "\n".join(lines)
