"""A request as the engine sees it: validated token ids, and how far they are."""

import enum
from dataclasses import dataclass, field
from typing import Any

from jaxllm.engine.block_pool import Key
from jaxllm.outputs import FinishReason
from jaxllm.sampling_params import SamplingParams


class Status(enum.Enum):
    WAITING = enum.auto()
    RUNNING = enum.auto()
    DRAINING = enum.auto()  # chosen as victim: left out of plans until nothing of it is in flight
    FINISHED = enum.auto()


@dataclass(eq=False, slots=True, kw_only=True)
class Request:
    """One sequence. The scheduler is its only writer; `check` in the scheduler states the invariants."""

    prompt_token_ids: list[int]
    params: SamplingParams
    arrival: int  # order of arrival, unique
    seed: int
    max_total_len: int  # tokens, prompt included, at which it ends
    stop_ids: frozenset[int] = frozenset()  # end of sequence and stop tokens
    bad_words: list[list[int]] = field(default_factory=list)  # as token ids
    eos_ids: frozenset[int] = frozenset()  # those of them that are no stop reason
    sample_index: int = 0
    priority: int = 0  # lower runs first
    host_dependent: bool = False  # its next step needs the token of this one on the host
    owner: Any = None  # of the layer above

    output_token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)  # one an output token, if wanted; see engine/logprobs.py
    prompt_logprobs: list[Any] = field(default_factory=list)  # of the tokens after the first, likewise
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None

    slot: int = -1
    epoch: int = 0  # grows with each eviction; results of an older epoch are dropped
    block_ids: list[int] = field(default_factory=list)
    num_tokens: int = 0  # known on the host: prompt and committed output
    num_computed: int = 0  # tokens whose keys and values some dispatched step writes
    num_in_flight: int = 0  # samples dispatched and not committed
    num_cached: int = -1  # prompt tokens found in the prefix cache at first admission; -1 before
    keys: list[Key] = field(default_factory=list)  # of its full blocks, as far as computed
    key_generation: int = 0  # the pool's, when they were
    num_keyed: int = 0  # leading blocks that were offered to the prefix cache
    strikes: int = 0  # failed steps it was in since it last got further
    suspect_len: int = 0  # tokens to get past before its strikes are forgotten

    def __post_init__(self) -> None:
        self.num_tokens = len(self.prompt_token_ids)

    def start_over(self) -> None:
        """Forgets where it ran and what was computed, not its tokens; what is in flight will be dropped."""
        self.epoch += 1
        self.status, self.slot, self.block_ids = Status.WAITING, -1, []
        self.num_tokens = len(self.prompt_token_ids) + len(self.output_token_ids)
        self.num_computed = self.num_in_flight = self.num_keyed = 0

    @property
    def order(self) -> tuple[int, int]:
        """Who goes first: lower priority value, then earlier arrival."""
        return (self.priority, self.arrival)

    @property
    def needs_full_sampler(self) -> bool:
        return self.params.needs_full_sampler

    @property
    def needs_extras(self) -> bool:
        """Whether the sampler needs this request's own row of the `SamplingExtras`."""
        return self.params.alters_logits or self.params.logprob_token_ids is not None

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.params.prompt_logprobs is not None and self.sample_index == 0

    @property
    def reads_prefix_cache(self) -> bool:
        skips = self.params.skip_reading_prefix_cache
        return not (self.wants_prompt_logprobs if skips is None else skips)

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Known tokens `start` to `stop`, of prompt and output."""
        n = len(self.prompt_token_ids)
        if stop <= n:
            return self.prompt_token_ids[start:stop]
        if start >= n:
            return self.output_token_ids[start - n : stop - n]
        return self.prompt_token_ids[start:] + self.output_token_ids[: stop - n]
