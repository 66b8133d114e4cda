"""The same requests, run several times on an engine, and tables of what they took."""

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

from jaxllm.bench.throughput import check_lengths_made
from jaxllm.engine.stats import EngineStats
from jaxllm.sampling_params import SamplingParams

Columns = Sequence[tuple[str, str, str]]  # key in a row, title, format


class Runs(NamedTuple):
    wall_s: float  # the median
    before: EngineStats  # of the last run, as is `after`
    after: EngineStats

    def counted(self, name: str) -> int:
        """How much one of the statistics' counters has grown in one run."""
        return getattr(self.after, name) - getattr(self.before, name)

    @property
    def num_steps(self) -> int:
        return sum(self.after.step_counts) - sum(self.before.step_counts)


def run_often(
    llm: Any, prompts: Sequence[list[int]], output_len: int, repeats: int, tick: Callable[[], Any], **sampling: Any
) -> Runs:
    """`repeats` runs after one to warm up, each with an empty prefix cache; greedy but for `sampling`. `tick` is called
    after each."""
    options = {"temperature": 0.0, "max_tokens": output_len, "ignore_eos": True, "detokenize": False} | sampling
    params, seconds = SamplingParams(**options), []
    for _ in range(1 + repeats):
        llm.engine.scheduler.pool.forget_keys()
        before = llm.stats()
        start = time.perf_counter()
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        seconds.append(time.perf_counter() - start)
        check_lengths_made(outputs, output_len)
        after = llm.stats()
        tick()
    return Runs(median(seconds[1:]), before, after)


def table_lines(rows: Sequence[dict[str, Any]], first: str, columns: Columns, width: int) -> list[str]:
    """A title, then a line for each row: what it has under `first`, then its `columns`, each of this width."""
    lines = [f"{first:<12}" + "".join(f"{title:>{width}}" for _, title, _ in columns)]
    return lines + [
        f"{row[first]:<12}" + "".join(f"{row[name]:>{width}{form}}" for name, _, form in columns) for row in rows
    ]
