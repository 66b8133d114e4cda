"""Host time of samples as arrays: what the thread that calls `LLM.rollout` computes. The model's steps are work of
others, on a CPU too, whose work slows this thread: so the same again, with steps that nobody computes. The model is the
package's, prompts are random."""

import time
from statistics import median_low
from typing import Any

import numpy as np

from benchmarks.fake_executor import FakeExecutor
from benchmarks.runs import table_lines

_COLUMNS = (
    ("tokens", "tokens a sample", "d"),
    ("arrays_us", "µs a token", ".2f"),
    ("logprobs_us", "with log-probabilities", ".2f"),
    ("generate_us", "generate", ".2f"),
    ("alone_us", "no steps computed", ".2f"),
)
_N, _PROMPT_LEN, _BLOCK_SIZE = 8, 32, 32


def run(*, slots: list[int], tokens: list[int], prompts: int, repeats: int, seed: int) -> dict[str, Any]:
    """The report; medians of `repeats` runs."""
    from jaxllm import LLM, SamplingParams

    rng, rows = np.random.default_rng(seed), []
    token_ids = rng.integers(5, 4000, (prompts, _PROMPT_LEN))
    for num in slots:
        at_once, most = max(128, num), _PROMPT_LEN + max(tokens)
        with LLM(
            max_num_seqs=num,
            max_num_batched_tokens=at_once,
            max_model_len=most,
            block_size=_BLOCK_SIZE,
            num_blocks=num * (most // _BLOCK_SIZE + 2),  # so that nobody is preempted
        ) as llm:
            llm.wait_compiled()
            of_slots = []
            for length in tokens:
                plain = SamplingParams(n=_N, max_tokens=length, ignore_eos=True, detokenize=False, seed=seed)
                told = plain.clone()
                told.logprobs = 0
                lists = token_ids.tolist()
                ways = {
                    "arrays_us": lambda plain=plain, llm=llm: llm.rollout(token_ids, plain),
                    "logprobs_us": lambda told=told, llm=llm: llm.rollout(token_ids, told),
                    "generate_us": lambda told=told, llm=llm, lists=lists: llm.generate(lists, told, use_tqdm=False),
                }
                count = prompts * _N * length
                found = {name: _thread_us(way, repeats) / count for name, way in ways.items()}
                of_slots.append({"slots": num, "tokens": length} | found)
            runner = llm.engine.runner
            executor = runner.executor  # in whose place there is one that makes up tokens
            runner.executor = FakeExecutor(llm.engine.config, lambda samples: np.full(len(samples.slots), 9, np.int32))
            for row in of_slots:
                params = SamplingParams(n=_N, max_tokens=row["tokens"], ignore_eos=True, detokenize=False)
                alone_us = _thread_us(lambda params=params, llm=llm: llm.rollout(token_ids, params), repeats)
                row["alone_us"] = alone_us / (prompts * _N * row["tokens"])
            runner.executor = executor
            rows += of_slots
    options = {"prompts": prompts, "n": _N, "prompt_len": _PROMPT_LEN, "repeats": repeats, "seed": seed}
    return {"benchmark": "rollouts", "options": options, "results": rows}


def _thread_us(way: Any, repeats: int) -> float:
    """Microseconds of the CPU that this thread takes."""
    way()
    seconds = []
    for _ in range(repeats):
        start = time.thread_time()
        way()
        seconds.append(time.thread_time() - start)
    return 1e6 * median_low(seconds)


def table(report: dict[str, Any]) -> str:
    """A line for each number of sequences at once and of tokens a sample."""
    options = report["options"]
    lines = [
        f"{options['prompts']} prompts of {options['prompt_len']} tokens, {options['n']} samples each",
        *table_lines(report["results"], "slots", _COLUMNS, 24),
        f"medians of {options['repeats']} runs",
    ]
    return "\n".join(lines)
