"""A sequence as the scheduler sees it."""

import enum
from collections import abc
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from jaxllm.engine.schedule.block_table import BlockTable
from jaxllm.engine.schedule.targets import Targets
from jaxllm.outputs import FinishReason
from jaxllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    import numpy as np

    from jaxllm.engine.logprobs import PackedLogprobs
    from jaxllm.engine.schedule.decode_batch import DecodeBatch
    from jaxllm.engine.schedule.sequence_group import SequenceGroup
    from jaxllm.grammar.matcher import Matcher


BARE_LOGPROBS = -1  # as `Sequence.num_logprobs`: the log-probability of its token alone, as a number


class Status(enum.Enum):
    WAITING = enum.auto()
    RUNNING = enum.auto()
    HELD = enum.auto()  # in its slot, until its group has a token for it
    DRAINING = enum.auto()  # a victim: left out of plans until nothing of it is in flight
    FINISHED = enum.auto()


Propose = Callable[["Sequence", int], abc.Sequence[int]]  # of a sequence, at most so many of its next tokens
Pooling = Literal["last", "mean", "cls"]  # the last token's hidden state, the mean of all, the first one's


class End(NamedTuple):
    """Why a sequence is over."""

    reason: FinishReason
    stop_reason: int | str | None = None  # the stop token or string
    error: str | None = None


class HasEnd:
    """What reads like a sequence that may be over."""

    __slots__ = ()
    end: End | None

    @property
    def finish_reason(self) -> FinishReason | None:
        return None if self.end is None else self.end.reason

    @property
    def stop_reason(self) -> int | str | None:
        return None if self.end is None else self.end.stop_reason

    @property
    def error(self) -> str | None:
        return None if self.end is None else self.end.error


class Traits(NamedTuple):
    """What parameters ask for: properties of `SamplingParams`, worked out once for all of a request's sequences."""

    needs_full_sampler: bool
    alters_logits: bool
    reads_history: bool
    has_rules: bool
    num_logprobs: int  # that are kept of each token

    @classmethod
    def of(cls, params: SamplingParams) -> "Traits":
        num_logprobs = 1 + (len(params.logprob_token_ids or ()) or params.num_top_logprobs)
        return cls(
            params.needs_full_sampler,
            params.alters_logits,
            params.reads_history,
            params.has_rules,
            num_logprobs if params.tracks_logprobs else 0,
        )


@dataclass(eq=False, slots=True, kw_only=True)
class Sequence(HasEnd):
    """One sequence, a sample or a beam. The scheduler is its only writer; its `check` states the invariants."""

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
    propose: Propose | None = None  # guesses its next tokens
    pooling: Pooling | None = None  # what of its prompt's hidden states is wanted, in the place of tokens
    targets: Targets | None = None  # whose log-probabilities are wanted, in the place of tokens
    matcher: "Matcher | None" = None  # where its text is in a grammar, if it has to follow one
    group: "SequenceGroup" = field(init=False, repr=False)  # which sets it
    request: Any = field(init=False, repr=False)  # of the layer above, which sets it: with a text, or pooled

    own_token_ids: list[int] = field(default_factory=list)  # `output_token_ids`, but what its batch's log has of it
    own_logprobs: list[Any] = field(default_factory=list)  # likewise
    versions: list[tuple[int, int]] = field(default_factory=list)  # of the parameters, each from an output token on
    version: int = -1  # the last of those
    pooled: "np.ndarray | None" = None  # float32, of its prompt's hidden states, if that is wanted
    prompt_logprobs: "list[PackedLogprobs]" = field(default_factory=list)  # of the tokens after the first, likewise
    status: Status = Status.WAITING
    end: End | None = None

    slot: int = -1
    epoch: int = 0  # grows with each eviction; results of an older epoch are dropped
    table: BlockTable = field(init=False)  # from when the scheduler has it
    fork_len: int = 0  # while siblings wait for it to have computed so many tokens, and go on from there
    packed_params: "np.ndarray | None" = None  # the fields of its slot row that never change
    has_rules: bool = False  # its slot's row of the `LogitRules` is installed
    num_cached: int = -1  # prompt tokens found in the prefix cache at first admission; -1 before
    reports_tokens: bool = True  # whether the layer above looks at each token, or at its end only
    bare_logprobs: bool = False  # whether of log-probabilities no more is looked at than the tokens' own

    batch: "DecodeBatch | None" = None  # that it has a row in
    computed_offset: int = 0  # `num_computed`, less the steps of its batch
    log_step: int = 0  # the first of those whose token the batch's log may have, and it has not
    traits: Traits = field(init=False)
    num_logprobs: int = field(init=False)  # that are kept of each token, or `BARE_LOGPROBS`
    like: InitVar["Sequence | None"] = None  # a sibling, of the same parameters

    def __post_init__(self, like: "Sequence | None") -> None:
        self.traits = Traits.of(self.params) if like is None else like.traits
        num_logprobs = self.traits.num_logprobs
        self.num_logprobs = BARE_LOGPROBS if num_logprobs and self.bare_logprobs else num_logprobs

    def leave_device(self) -> None:
        """Forgets its slot, and ends its epoch, so that results in flight are dropped."""
        self._collect()
        self.epoch += 1
        self.status, self.slot = Status.WAITING, -1
        self.batch, self.has_rules, self.fork_len = None, False, 0

    def note_version(self, version: int) -> None:
        """Its next tokens come from these parameters."""
        self.version = version
        self.versions.append((len(self.output_token_ids), version))

    def vacate(self) -> None:
        """The beam died: keep its slot, forget its tokens."""
        self.status, self.num_computed = Status.HELD, 0
        self.own_token_ids, self.own_logprobs, self.matcher = [], [], None

    @property
    def output_token_ids(self) -> list[int]:
        """Committed output."""
        self._collect()
        return self.own_token_ids

    @property
    def logprobs(self) -> list[Any]:
        """Of each output token, if wanted: `PackedLogprobs`, or floats."""
        self._collect()
        return self.own_logprobs

    def _collect(self) -> None:
        if self.batch is not None:
            self.batch.deliver(self)

    @property
    def num_tokens(self) -> int:
        """Tokens known on the host: prompt and committed output."""
        num_own = len(self.prompt_token_ids) + len(self.own_token_ids)
        return num_own if self.batch is None else num_own + self.batch.num_undelivered(self)

    @property
    def num_computed(self) -> int:
        """Tokens whose keys and values some dispatched step writes."""
        batch = self.batch  # read once: statistics are read in another thread
        return self.computed_offset + (0 if batch is None else batch.num_steps)

    @num_computed.setter
    def num_computed(self, num_tokens: int) -> None:
        assert self.batch is None, "the batch's steps count"
        self.computed_offset = num_tokens

    @property
    def num_in_flight(self) -> int:
        """Samples dispatched and not committed: the last of its tokens that was computed gives the next."""
        return 0 if self.status is Status.HELD else max(0, self.num_computed + 1 - self.num_tokens)

    @property
    def can_sample(self) -> bool:
        """Whether a running one may have a row that samples in the next step."""
        if self.status is Status.HELD:
            return True
        num_known = self.num_tokens
        num_after = self.num_computed + 1  # its tokens when what is in flight is there
        return num_after <= num_known or num_after < self.max_total_len and not self.host_dependent

    @property
    def is_steady(self) -> bool:
        """Whether one that decodes goes on like that for more than one step, with nothing to decide."""
        is_plain = self.matcher is None and not self.host_dependent
        is_alone = not (self.fork_len or self.table.shares_tail)
        return is_plain and is_alone and self.status is Status.RUNNING and self.num_computed < self.max_total_len - 1

    @property
    def generates(self) -> bool:
        """Whether tokens are drawn after the last one that is known."""
        return self.pooling is None and self.targets is None

    @property
    def num_skippable(self) -> int:
        """Of its known tokens, the first ones whose keys and values are all that is wanted: others may have computed
        them."""
        if self.targets is None:
            return self.num_tokens - 1
        return len(self.prompt_token_ids) - 1 + self.targets.num_known

    @property
    def order(self) -> tuple[int, int]:
        """Who goes first: lower priority value, then earlier arrival."""
        return (self.priority, self.arrival)

    @property
    def host_dependent(self) -> bool:
        """Whether its next step needs the token of this one on the host."""
        return self.propose is not None or self.group.chooses_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.params.prompt_logprobs is not None and self.sample_index == 0

    @property
    def awaits_prompt_logprobs(self) -> bool:
        return self.wants_prompt_logprobs and len(self.prompt_logprobs) < len(self.prompt_token_ids) - 1

    @property
    def reads_prefix_cache(self) -> bool:
        """A prompt of which more than the last hidden state is wanted is computed, whatever `skip_reading_prefix_cache`
        says: a cached block has none."""
        needs_all = self.awaits_prompt_logprobs or self.pooling in ("mean", "cls")
        return not (self.params.skip_reading_prefix_cache or needs_all)

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Known tokens `start` to `stop`, of prompt and output."""
        n = len(self.prompt_token_ids)
        if stop <= n:
            return self.prompt_token_ids[start:stop]
        if start >= n:
            return self.output_token_ids[start - n : stop - n]
        return self.prompt_token_ids[start:] + self.output_token_ids[: stop - n]
