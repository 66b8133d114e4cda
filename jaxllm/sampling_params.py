"""How a request wants its tokens chosen, and when it ends. Validated once, here, for every entrance."""

from dataclasses import dataclass, field
from typing import Any

MAX_N = 128
MAX_STOPS = 32
MAX_STOP_TOKEN_IDS = 16  # a fixed width of the device's slot table


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters, with vLLM's names and defaults. Raises `ValueError` naming field, value and range.

    Filters apply in the order temperature, min-p, top-k, top-p; tokens tied with the last one kept are kept too.
    """

    n: int = 1  # completions, 1 .. 128
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 or -1: all
    top_p: float = 1.0  # 0 .. 1; 0 keeps the most likely token
    min_p: float = 0.0  # 0 .. 1, relative to the most likely token
    seed: int | None = None  # the same text whatever runs beside it
    max_tokens: int | None = 16  # None: up to the model's context
    min_tokens: int = 0  # no end of sequence and no stop token before
    stop: str | list[str] | None = None  # strings, not part of the text returned
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    stops: tuple[str, ...] = field(init=False, repr=False, default=())

    def __post_init__(self) -> None:
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        object.__setattr__(self, "stops", tuple(_as_list("stop", stop)))
        ids = _as_list("stop_token_ids", self.stop_token_ids)
        for token in ids:
            _check_int("stop_token_ids", token, 0, 2**31 - 1)
        object.__setattr__(self, "stop_token_ids", list(dict.fromkeys(ids)))
        self._check_numbers()
        self._check_stops()
        for name in ("ignore_eos", "skip_special_tokens", "detokenize"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} must be True or False")

    def _check_numbers(self) -> None:
        _check_int("n", self.n, 1, MAX_N)
        _check_float("temperature", self.temperature, 0.0, 2.0)
        _check_int("top_k", self.top_k, -1, 2**31 - 1)
        _check_float("top_p", self.top_p, 0.0, 1.0)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**63), 2**64 - 1)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _check_int("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}; lower one or raise the other"
            )

    def _check_stops(self) -> None:
        if len(self.stops) > MAX_STOPS:
            raise ValueError(f"stop has {len(self.stops)} strings; at most {MAX_STOPS} are allowed")
        if not all(isinstance(s, str) and s for s in self.stops):
            raise ValueError(f"stop={self.stop!r} must hold non-empty strings")
        if self.stops and not self.detokenize:
            raise ValueError("stop strings need detokenize=True; use stop_token_ids instead")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise ValueError(
                f"stop_token_ids has {len(self.stop_token_ids)} ids; at most {MAX_STOP_TOKEN_IDS} are allowed"
            )


def _as_list(name: str, value: Any) -> list:
    if not isinstance(value, list | tuple | None):
        raise ValueError(f"{name}={value!r} must be a list")
    return list(value or ())


def _check_int(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{name}={value!r} must be an integer in [{low}, {high}]")


def _check_float(name: str, value: Any, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:  # NaN is not
        raise ValueError(f"{name}={value!r} must be a finite number in [{low:g}, {high:g}]")
