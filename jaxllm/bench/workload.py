"""Seeded workloads of token ids, the same for every engine.

A workload depends on kind, seed, scale and vocabulary only. Engines ignore the end of sequence, so that each does the
same work. Requests for one completion are greedy; others sample at temperature 1 or search with beams.
"""

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

FIRST_ID = 10  # lower ids are often special tokens
MAX_VOCAB = 8000  # the default; most models have as many tokens. Another value gives other ids


class WorkloadRequest(NamedTuple):
    """One request of a workload."""

    prompt_token_ids: list[int]
    max_tokens: int
    n: int = 1  # completions
    beam_width: int | None = None  # beam search for the best completion
    is_apart: bool = False  # sampled, without sharing prefixes


class _Draw:
    """Draws random ids and lengths, and scales counts."""

    def __init__(self, name: str, vocab: int, scale: float):
        self._rng, self._vocab, self._scale = random.Random(name), vocab, scale
        self.length = self._rng.randint

    def ids(self, n: int) -> list[int]:
        return [self._rng.randrange(FIRST_ID, self._vocab) for _ in range(n)]

    def count(self, n: int) -> range:
        return range(max(1, round(n * self._scale)))

    def skewed(self, mean_log: float, most: int) -> int:
        """A log-normal length: many short, few very long."""
        return min(most, int(self._rng.lognormvariate(mean_log, 1.0)) + 4)


def _batch1(draw: _Draw) -> list[WorkloadRequest]:
    return [WorkloadRequest(draw.ids(64), 128)]


def _mixed(draw: _Draw) -> list[WorkloadRequest]:
    return [WorkloadRequest(draw.ids(draw.length(16, 256)), draw.length(16, 128)) for _ in draw.count(64)]


def _decode(draw: _Draw) -> list[WorkloadRequest]:
    return [WorkloadRequest(draw.ids(16), 128) for _ in draw.count(32)]


def _prefill(draw: _Draw) -> list[WorkloadRequest]:
    return [WorkloadRequest(draw.ids(768), 4) for _ in draw.count(16)]


def _prefix(draw: _Draw) -> list[WorkloadRequest]:
    heads = [draw.ids(512) for _ in range(4)]
    return [WorkloadRequest(heads[i % 4] + draw.ids(16), 16) for i in draw.count(32)]


def _ragged(draw: _Draw) -> list[WorkloadRequest]:
    return [WorkloadRequest(draw.ids(draw.skewed(4.2, 700)), draw.skewed(3.5, 250)) for _ in draw.count(48)]


def _n3(draw: _Draw) -> list[WorkloadRequest]:
    return [WorkloadRequest(draw.ids(draw.length(64, 256)), draw.length(16, 96), n=3) for _ in draw.count(16)]


def _n3apart(draw: _Draw) -> list[WorkloadRequest]:
    return [request._replace(n=1, is_apart=True) for request in _n3(draw) for _ in range(request.n)]


def _beam4(draw: _Draw) -> list[WorkloadRequest]:
    return [WorkloadRequest(draw.ids(draw.length(16, 64)), 32, beam_width=4) for _ in draw.count(4)]


_MAKERS: dict[str, tuple[Callable[[_Draw], list[WorkloadRequest]], str]] = {
    "batch1": (_batch1, "one request at a time"),
    "mixed": (_mixed, "prompts and outputs of uniform lengths"),
    "decode": (_decode, "short prompts, long outputs"),
    "prefill": (_prefill, "long prompts, short outputs"),
    "prefix": (_prefix, "four groups that share a long beginning"),
    "ragged": (_ragged, "very unequal lengths"),
    "n3": (_n3, "three sampled completions of each prompt"),
    "n3apart": (_n3apart, "the same as three requests that share nothing"),
    "beam4": (_beam4, "the best of four beams"),
}
KINDS = {kind: meaning for kind, (_, meaning) in _MAKERS.items()}


def check_kinds(kinds: Sequence[str]) -> None:
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        raise ValueError(f"workload {unknown[0]!r} is unknown; choose from {', '.join(KINDS)}")


def check_vocab(vocab: int, model_vocab: int) -> None:
    if not FIRST_ID < vocab <= model_vocab:
        raise ValueError(
            f"vocab={vocab} must be in [{FIRST_ID + 1}, {model_vocab}]: token ids are drawn from {FIRST_ID} on, and "
            f"the model has {model_vocab} of them"
        )


def check_lengths(name: str, prompt_len: int, output_len: int, max_model_len: int) -> None:
    if prompt_len + output_len > max_model_len:
        raise ValueError(
            f"{name} has {prompt_len} tokens of prompt and {output_len} of output, more than "
            f"max_model_len={max_model_len}; leave it out, or raise max_model_len if the model allows it"
        )


def make(kind: str, *, vocab: int = MAX_VOCAB, seed: int = 0, scale: float = 1.0) -> list[WorkloadRequest]:
    """The workload `kind` with token ids in [10, vocab); `scale` multiplies the number of requests."""
    check_kinds([kind])
    name = kind.removesuffix("apart")  # both have the same ids
    return _MAKERS[kind][0](_Draw(f"{name}-{seed}", vocab, scale))


def prompts(count: int, length: int, *, vocab: int, seed: int) -> list[list[int]]:
    """`count` prompts of `length` tokens each."""
    draw = _Draw(f"prompts-{seed}", vocab, 1.0)
    return [draw.ids(length) for _ in range(count)]
