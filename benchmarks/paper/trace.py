"""Traces of requests by their lengths alone, as PagedAttention (arXiv 2309.06180, section 6.1) was measured with, and
when the requests arrive."""

import math
import random
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any, NamedTuple

MEANS = {"alpaca": (19, 58), "sharegpt": (161, 338)}  # tokens in and out, those of the paper's data sets
SIGMA = 1.0  # of the lengths' logarithms: many are short, a few very long


class TraceRequest(NamedTuple):
    """Tokens of a prompt, and of each completion."""

    prompt_len: int
    output_len: int


class Trace(NamedTuple):
    name: str
    items: list[TraceRequest]
    num_cut: int  # of them, for being longer than a sequence may be

    @property
    def summary(self) -> dict[str, Any]:
        prompts, outputs = zip(*self.items, strict=True)
        return {
            "requests": len(self.items),
            "cut": self.num_cut,
            "mean_prompt_len": sum(prompts) / len(prompts),
            "mean_output_len": sum(outputs) / len(outputs),
        }


def make(name: str, requests: int, *, seed: int, max_len: int) -> Trace:
    """`requests` pairs of independent log-normal lengths with the means of `MEANS[name]`: evenly spaced quantiles, so
    that few requests have the distribution of many, in an order that the seed decides.

    A prompt is cut to half of `max_len` tokens, and an output to what is left of them; both have at least one.
    """
    rng = random.Random(f"{name}-{seed}")
    items, num_cut = [], 0
    for drawn in map(TraceRequest, *(_lengths(mean, requests, rng) for mean in MEANS[name])):
        prompt_len = min(drawn.prompt_len, max_len // 2)
        items.append(TraceRequest(prompt_len, min(drawn.output_len, max_len - prompt_len)))
        num_cut += items[-1] != drawn
    return Trace(name, items, num_cut)


def _lengths(mean: int, count: int, rng: random.Random) -> list[int]:
    logs = NormalDist(math.log(mean) - SIGMA**2 / 2, SIGMA)
    lengths = [max(1, round(math.exp(logs.inv_cdf((i + 0.5) / count)))) for i in range(count)]
    rng.shuffle(lengths)
    return lengths


def arrivals(count: int, gap: float, *, seed: int) -> list[float]:
    """When each of `count` requests arrives, in steps: a Poisson process with `gap` steps between two on average."""
    rng = random.Random(f"arrivals-{seed}")
    times, now = [], 0.0
    for _ in range(count):
        now += rng.expovariate(1 / gap)
        times.append(now)
    return times


def mean_gap(items: Sequence[TraceRequest], n: int, *, num_slots: int, max_num_seqs: int, load: float) -> float:
    """Steps between arrivals that keep the share `load` of memory or of seats busy, whichever is scarcer, if `n`
    sequences of each request share nothing."""
    seat_steps = sum(n * item.output_len for item in items) / len(items)
    slot_steps = sum(n * item.output_len * (item.prompt_len + item.output_len / 2) for item in items) / len(items)
    return max(slot_steps / num_slots, seat_steps / max_num_seqs) / load
