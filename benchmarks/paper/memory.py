"""How well KV memory is used: the share that holds no token, and the blocks saved because sequences share them.

The measurements of the PagedAttention paper (arXiv 2309.06180, figures 2 and 15) with this engine. Lengths decide all
but what beams share: so the engine runs on an executor that makes up its tokens, and beams on the embedded model. Each
measure is a ratio of sums over a run's steps (see `PagedUsage`).
"""

import datetime
import platform
import random
from collections import abc, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.fake_executor import fake_engine
from benchmarks.paper import contiguous, trace
from benchmarks.paper.trace import Trace, TraceRequest
from jaxllm.bench import report as about
from jaxllm.engine.config import EngineConfig
from jaxllm.engine.device.packing import SampleInput
from jaxllm.engine.engine import Engine
from jaxllm.engine.schedule.plan import Plan
from jaxllm.engine.schedule.scheduler import Scheduler
from jaxllm.sampling_params import SamplingParams

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)  # tokens
BLOCK_SIZE = 16  # where sharing is measured, as in the paper
WIDTHS = (2, 4, 6)  # samples, or beams
POOL_SLOTS = 60_160  # tokens; the paper's OPT-175B has 60.1K
MAX_NUM_SEQS = 256
MAX_NUM_BATCHED_TOKENS = 2048
VOCAB = 2**30  # so many tokens that no two prompts meet
LOAD = 0.7  # of the pool or of the seats, by sequences that share nothing: little has to be preempted
# Published in the paper, in percent: memory without a token (figure 2), savings of 2 and of 6 sequences (section 6.3).
PAPER_WASTED = {"max": 79.6, "pow2": 73.2, "oracle": 61.8, "blocks": 3.7}
PAPER_SAVED = {
    ("samples", "alpaca"): (6.1, 9.8),
    ("samples", "sharegpt"): (16.2, 30.5),
    ("beams", "alpaca"): (37.6, 55.2),
    ("beams", "sharegpt"): (44.3, 66.3),
}


@dataclass
class PagedUsage:
    """Sums over the steps that were looked at.

    A step is looked at when it has been planned and the one before is not committed: what the device needs while it
    runs. The blocks taken for the step are held, and its tokens count as written. A sequence's newest token is not in
    the pool yet; its slot is taken, and filled, by the step that computes it. Blocks that nobody holds are free, even
    if the prefix cache could still hit them.
    """

    held_blocks: int = 0  # each once, however many share it
    held_slots: int = 0  # tokens' places in them
    wasted_slots: int = 0  # of those, without a token
    alone_blocks: int = 0  # that the sequences would hold if each had its own

    def look(self, scheduler: Scheduler) -> None:
        pool = scheduler.pool
        self.held_blocks += pool.num_used
        self.held_slots += pool.num_used * pool.block_size
        self.wasted_slots += scheduler.running_set.num_wasted_slots
        self.alone_blocks += sum(pool.refs)

    @contextmanager
    def looking(self, scheduler: Scheduler, when: Callable[[], bool] = lambda: True) -> Iterator[None]:
        """Looks at each step when it has been planned, if it is to be looked at."""
        schedule = scheduler.schedule

        def schedule_and_look(max_tokens: int, *, awaits_host: bool = False) -> Plan | None:
            plan = schedule(max_tokens, awaits_host=awaits_host)
            if when():
                self.look(scheduler)
            return plan

        scheduler.schedule = schedule_and_look
        try:
            yield
        finally:
            del scheduler.schedule

    @property
    def wasted(self) -> float:
        """The share of the held memory that holds no token."""
        return self.wasted_slots / self.held_slots

    @property
    def saved(self) -> float:
        """The share of the blocks needed without sharing that sharing saves."""
        return 1 - self.held_blocks / self.alone_blocks


@dataclass(frozen=True)
class SimulatedRun:
    usage: PagedUsage
    steps: int
    preemptions: int  # of sequences


def simulate(
    items: abc.Sequence[TraceRequest],
    arrivals: abc.Sequence[float],
    *,
    num_blocks: int,
    block_size: int,
    n: int = 1,
    max_num_seqs: int = MAX_NUM_SEQS,
    every: int | None = None,
) -> SimulatedRun:
    """Runs requests for `n` samples, each of its `output_len` tokens, through the engine.

    Prompts and samples are random, so that the prefix cache finds only what a preempted sequence, or an earlier sample
    of the same prompt, has left there. One step in `every` is looked at; None: in all if blocks are large, in fewer
    the more there are to count.
    """
    every = every or 32 // block_size | 1  # odd, so that it meets blocks of any size at each stage
    rng = random.Random("tokens")
    engine = _open_engine(num_blocks, block_size, max_num_seqs, rng)
    waiting = deque(zip(arrivals, items, strict=True))
    usage, step, num_requests = PagedUsage(), 0, 0
    (scheduler,) = engine.scheduler.shards
    with usage.looking(scheduler, lambda: step % every == 0 or not usage.held_blocks):
        while waiting or engine.has_work():
            while waiting and waiting[0][0] <= step:
                _add(engine, waiting.popleft()[1], n, num_requests, rng)
                num_requests += 1
            engine.step()
            step += 1
    engine.close()
    return SimulatedRun(usage, step, scheduler.preemption.num_recomputed)


def _open_engine(num_blocks: int, block_size: int, max_num_seqs: int, rng: random.Random) -> Engine:
    config = EngineConfig(
        max_model_len=num_blocks * block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(MAX_NUM_BATCHED_TOKENS, max_num_seqs),
        block_size=block_size,
        num_blocks=num_blocks,
        preemption="recompute",
    )

    def draw(given: SampleInput) -> np.ndarray:
        return np.array([_token(rng) for _ in given.slots], np.int32)

    return fake_engine(config, VOCAB, draw)


def _add(engine: Engine, item: TraceRequest, n: int, index: int, rng: random.Random) -> None:
    params = SamplingParams(n=n, max_tokens=item.output_len, ignore_eos=True, detokenize=False)
    engine.add([_token(rng) for _ in range(item.prompt_len)], params, request_id=f"memory-{index}")


def _token(rng: random.Random) -> int:
    return rng.randrange(VOCAB)


def run(*, requests: int, beam_requests: int, seed: int, max_len: int) -> dict[str, Any]:
    """The report. With no `beam_requests` there are no beams in it."""
    traces = {name: trace.make(name, requests, seed=seed, max_len=max_len) for name in trace.MEANS}
    num_runs = len(traces) * (len(contiguous.RESERVED) + len(BLOCK_SIZES) + len(WIDTHS))
    with tqdm(total=num_runs, desc="measuring", unit="run", disable=None, leave=False) as bar:
        wasted = [row for each in traces.values() for row in _wasted(each, seed, max_len, bar.update)]
        saved = [row for each in traces.values() for row in _saved_by_samples(each, seed, bar.update)]
    report = {
        "benchmark": "memory",
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "options": {
            "requests": requests,
            "beam_requests": beam_requests,
            "seed": seed,
            "max_len": max_len,
            "pool_slots": POOL_SLOTS,
            "max_num_seqs": MAX_NUM_SEQS,
            "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS,
            "load": LOAD,
        },
        "traces": {name: each.summary for name, each in traces.items()},
        "wasted": wasted,
        "saved": saved,
        "beams": None,
        "paper_percent": {
            "wasted": PAPER_WASTED,
            "saved": {" ".join(key): list(ends) for key, ends in PAPER_SAVED.items()},
        },
    }
    if beam_requests:
        from benchmarks.paper import memory_beams

        rows, report["beams"] = memory_beams.measure(requests=beam_requests, seed=seed)
        report["saved"] += rows
    return report


def check_max_len(max_len: int) -> None:
    """ValueError for sequences that the contiguous allocator has no chunk for."""
    largest = 1 << (POOL_SLOTS.bit_length() - 1)
    if max_len > largest:
        raise ValueError(
            f"--max-len is {max_len}; of the {POOL_SLOTS} token slots that are simulated, contiguous allocation can "
            f"give a sequence {largest} at most"
        )


def _wasted(each: Trace, seed: int, max_len: int, tick: Callable[[], Any]) -> list[dict[str, Any]]:
    items, arrivals = each.items, _arrivals(each, 1, seed)
    rows = []
    for name, reserved in contiguous.RESERVED.items():
        usage = contiguous.simulate(
            items,
            arrivals,
            lambda item, reserved=reserved: reserved(item, max_len),
            num_slots=POOL_SLOTS,
            max_num_seqs=MAX_NUM_SEQS,
            max_tokens=MAX_NUM_BATCHED_TOKENS,
        )
        figures = {"wasted": usage.wasted, "steps": usage.steps, "preemptions": 0}
        rows.append({"trace": each.name, "memory": name, "block_size": None, **figures})
        tick()
    for size in BLOCK_SIZES:
        done = simulate(items, arrivals, num_blocks=POOL_SLOTS // size, block_size=size)
        figures = {"wasted": done.usage.wasted, "steps": done.steps, "preemptions": done.preemptions}
        rows.append({"trace": each.name, "memory": "blocks", "block_size": size, **figures})
        tick()
    return rows


def _saved_by_samples(each: Trace, seed: int, tick: Callable[[], Any]) -> list[dict[str, Any]]:
    rows = []
    for n in WIDTHS:
        arrivals = _arrivals(each, n, seed)
        done = simulate(each.items, arrivals, num_blocks=POOL_SLOTS // BLOCK_SIZE, block_size=BLOCK_SIZE, n=n)
        rows.append(saved_row(each, "samples", n, done))
        tick()
    return rows


def saved_row(each: Trace, method: str, width: int, done: SimulatedRun) -> dict[str, Any]:
    return {
        "trace": each.name,
        "method": method,
        "width": width,
        "saved": done.usage.saved,
        "wasted": done.usage.wasted,
        "steps": done.steps,
        "preemptions": done.preemptions,
    }


def _arrivals(each: Trace, n: int, seed: int) -> list[float]:
    gap = trace.mean_gap(each.items, n, num_slots=POOL_SLOTS, max_num_seqs=MAX_NUM_SEQS, load=LOAD)
    return trace.arrivals(len(each.items), gap, seed=seed)


def table(report: dict[str, Any]) -> str:
    options = report["options"]
    lines = [
        f"{options['pool_slots']} token slots, at most {options['max_num_seqs']} sequences and "
        f"{options['max_num_batched_tokens']} tokens a step; seed {options['seed']}, Python {report['python']}"
    ]
    lines += _lengths(report["traces"], options["max_len"])
    lines += ["", *_wasted_table(report), "", *_saved_table(report)]
    if report["beams"] is not None:
        lines += ["", "beams: " + about.heading(report["beams"])]
        lines += _lengths(report["beams"]["traces"], report["beams"]["max_len"])
    preempted = sum(row["preemptions"] for row in report["wasted"] + report["saved"])
    return "\n".join([*lines, f"preempted sequences, of all runs: {preempted}"])


def _lengths(traces: dict[str, Any], max_len: int) -> list[str]:
    return [
        f"{name}: {each['requests']} requests of {each['mean_prompt_len']:.1f} tokens in and "
        f"{each['mean_output_len']:.1f} out on average, {each['cut']} of them cut to {max_len}"
        for name, each in traces.items()
    ]


def _wasted_table(report: dict[str, Any]) -> list[str]:
    names = list(report["traces"])
    head = "".join(f"{name:>12}" for name in [*names, "paper"])
    lines = [f"{'held KV memory without a token, %':<34}{head}"]
    wasted = {(row["memory"], row["block_size"], row["trace"]): row["wasted"] for row in report["wasted"]}
    for memory, size in dict.fromkeys((memory, size) for memory, size, _ in wasted):
        title = f"contiguous, {memory}" if size is None else f"blocks of {size}"
        cells = "".join(f"{100 * wasted[memory, size, name]:>12.2f}" for name in names)
        paper = PAPER_WASTED[memory] if size in (None, BLOCK_SIZE) else ""
        lines.append(f"  {title:<32}{cells}{paper:>12}".rstrip())
    return [*lines, "  paper: arXiv 2309.06180, figure 2; its figures for contiguous memory count gaps between chunks"]


def _saved_table(report: dict[str, Any]) -> list[str]:
    widths = "".join(f"{width:>12}" for width in WIDTHS)
    lines = [f"{f'blocks of {BLOCK_SIZE} saved by sharing, %':<34}{widths}{'paper':>16}"]
    saved = {(row["method"], row["trace"], row["width"]): row["saved"] for row in report["saved"]}
    for method, name in dict.fromkeys((method, name) for method, name, _ in saved):
        cells = "".join(f"{100 * saved[method, name, width]:>12.1f}" for width in WIDTHS)
        low, high = PAPER_SAVED[method, name]
        lines.append(f"  {method + ', ' + name:<32}{cells}{f'{low} to {high}':>16}")
    return [*lines, "  paper: section 6.3, from the fewest sequences to the most"]
