"""A sequence as the scheduler sees it, and the group of those that belong to one request."""

import enum
from abc import ABC, abstractmethod
from collections import abc
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from jaxllm.engine.schedule.block_table import BlockTable, Places
from jaxllm.outputs import FinishReason
from jaxllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    import numpy as np

    from jaxllm.engine.logprobs import PackedLogprobs
    from jaxllm.engine.output import Request
    from jaxllm.engine.schedule.decode_batch import DecodeBatch
    from jaxllm.engine.schedule.running import RunningSet
    from jaxllm.grammar.matcher import Matcher


class Status(enum.Enum):
    WAITING = enum.auto()
    RUNNING = enum.auto()
    HELD = enum.auto()  # a beam's slot, which waits for the other beams
    DRAINING = enum.auto()  # a victim: left out of plans until nothing of it is in flight
    FINISHED = enum.auto()


Propose = Callable[["Sequence", int], abc.Sequence[int]]  # of a sequence, at most so many of its next tokens


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


@dataclass(eq=False, slots=True)
class HostCopy:
    """Blocks of preempted siblings in host memory."""

    key: int
    num_pages: int
    groups: list[int]  # of each block
    places: "dict[Sequence, Places]"  # of each that wants its blocks back: where they are among the copied ones


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
    host_dependent: bool = field(init=False)  # its next step needs the token of this one on the host
    matcher: "Matcher | None" = None  # where its text is in a grammar, if it has to follow one
    group: "SequenceGroup" = None  # which it belongs to; its own if none is given
    request: "Request" = field(init=False, repr=False)  # of the layer above, which sets it

    output_token_ids: list[int] = field(default_factory=list)
    logprobs: "list[PackedLogprobs]" = field(default_factory=list)  # one an output token, if wanted
    prompt_logprobs: "list[PackedLogprobs]" = field(default_factory=list)  # of the tokens after the first, likewise
    status: Status = Status.WAITING
    end: End | None = None

    slot: int = -1
    epoch: int = 0  # grows with each eviction; results of an older epoch are dropped
    table: BlockTable = field(init=False)  # from when the scheduler has it
    fork_len: int = 0  # while siblings wait for it to have computed so many tokens, and go on from there
    packed_params: "np.ndarray | None" = None  # the fields of its slot row that never change
    has_rules: bool = False  # its slot's row of the `LogitRules` is installed
    candidates: "GroupRow | None" = None  # of a beam that waits for the other beams' candidates
    num_cached: int = -1  # prompt tokens found in the prefix cache at first admission; -1 before
    num_failures: int = 0  # failed steps it was in since it last got further
    retry_len: int = 0  # tokens to get past before its failures are forgotten
    reports_tokens: bool = True  # whether the layer above looks at each token, or at its end only

    batch: "DecodeBatch | None" = None  # whose row it has
    row: int = -1  # in the batch
    due_step: int = 0  # of the batch: before it something happens
    computed_offset: int = 0  # `num_computed`, less the steps of its batch

    def __post_init__(self) -> None:
        self.host_dependent = self.is_beam or self.propose is not None
        if self.group is None:
            self.group = Samples([self])

    def leave_device(self) -> None:
        """Forgets its slot, and ends its epoch, so that results in flight are dropped."""
        self.epoch += 1
        self.status, self.slot = Status.WAITING, -1
        self.batch, self.row = None, -1
        self.has_rules = False
        self.candidates, self.fork_len = None, 0

    def vacate(self) -> None:
        """The beam died: keep its slot, forget its tokens."""
        self.status, self.candidates, self.num_computed = Status.HELD, None, 0
        self.output_token_ids, self.logprobs, self.matcher = [], [], None

    @property
    def num_tokens(self) -> int:
        """Tokens known on the host: prompt and committed output."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

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
        return 0 if self.candidates is not None else max(0, self.num_computed + 1 - self.num_tokens)

    @property
    def can_sample(self) -> bool:
        """Whether a running one may have a row that samples in the next step."""
        num_in_flight = self.num_in_flight
        return not num_in_flight or not self.host_dependent and self.num_tokens + num_in_flight < self.max_total_len

    @property
    def is_steady(self) -> bool:
        """Whether one that decodes goes on like that for more than one step, with nothing to decide."""
        is_plain = self.matcher is None and not (self.host_dependent or self.num_failures)
        is_alone = not (self.fork_len or self.table.shares_tail)
        return is_plain and is_alone and self.status is Status.RUNNING and self.num_computed < self.max_total_len - 1

    @property
    def order(self) -> tuple[int, int]:
        """Who goes first: lower priority value, then earlier arrival."""
        return (self.priority, self.arrival)

    @property
    def is_beam(self) -> bool:
        """Whether a beam search chooses its tokens."""
        return self.params.beam_width is not None

    @property
    def needs_full_sampler(self) -> bool:
        return self.params.needs_full_sampler

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.params.prompt_logprobs is not None and self.sample_index == 0

    @property
    def awaits_prompt_logprobs(self) -> bool:
        return self.wants_prompt_logprobs and len(self.prompt_logprobs) < len(self.prompt_token_ids) - 1

    @property
    def reads_prefix_cache(self) -> bool:
        """A prompt whose log-probabilities are awaited is computed, whatever `skip_reading_prefix_cache` says: a cached
        block has none."""
        return not (self.params.skip_reading_prefix_cache or self.awaits_prompt_logprobs)

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Known tokens `start` to `stop`, of prompt and output."""
        n = len(self.prompt_token_ids)
        if stop <= n:
            return self.prompt_token_ids[start:stop]
        if start >= n:
            return self.output_token_ids[start - n : stop - n]
        return self.prompt_token_ids[start:] + self.output_token_ids[: stop - n]


@runtime_checkable
class GroupRow(Protocol):
    """What a step says of a sequence whose next token its group chooses; the group alone reads it."""


class GroupStep(NamedTuple):
    """What a group makes of a step."""

    moved: list[Sequence]  # whose slots' rows are out of date
    end: End | None  # of all its sequences, if they end with this step


class SequenceGroup(ABC):
    """The sequences of one request. They share blocks, and leave the device together."""

    def __init__(self, sequences: list[Sequence]):
        self.sequences = sequences
        self.waiting: list[Sequence] = []  # for a slot, by arrival; the queue is its only writer
        self.host_copy: HostCopy | None = None  # of the blocks of those that were swapped out
        for sequence in sequences:
            sequence.group = self

    @property
    def on_device(self) -> list[Sequence]:
        """Those that have a slot."""
        return [sequence for sequence in self.sequences if sequence.slot >= 0]

    @property
    @abstractmethod
    def live(self) -> list[Sequence]:
        """Those that have tokens to go on from."""

    @abstractmethod
    def companions(self, parent: Sequence) -> list[Sequence]:
        """Who gets a slot at once with the first that enters."""

    @abstractmethod
    def forks(self, parent: Sequence) -> list[Sequence]:
        """Who goes on from what the parent computes."""

    @abstractmethod
    def head(self, sequence: Sequence) -> Sequence:
        """Which of the request's sequences tells the end of this one."""

    @abstractmethod
    def num_slots(self, num_entering: int) -> int:
        """Slots that must be free before `num_entering` live ones get theirs."""

    @abstractmethod
    def returning(self, victims: list[Sequence]) -> list[Sequence]:
        """Which of the preempted sequences wait to come back."""

    @abstractmethod
    def split_off(self, sequence: Sequence) -> None:
        """Gives a sequence a group of its own, so that the others can run without it."""

    @abstractmethod
    def finish(self, sequence: Sequence, end: End) -> list[Sequence]:
        """Who ends when the sequence does."""

    @abstractmethod
    def commit(self, sequence: Sequence, row: "GroupRow", running_set: "RunningSet") -> GroupStep:
        """Takes what a step says of a sequence whose next token the group chooses."""

    @abstractmethod
    def restart(self) -> None:
        """Nothing of it is on the device any more: its sequences go back to their committed tokens."""


class Samples(SequenceGroup):
    """Sequences that are drawn independently of each other."""

    @property
    def live(self) -> list[Sequence]:
        return self.sequences

    def companions(self, parent: Sequence) -> list[Sequence]:
        return []

    def forks(self, parent: Sequence) -> list[Sequence]:
        return self.waiting

    def head(self, sequence: Sequence) -> Sequence:
        return sequence

    def num_slots(self, num_entering: int) -> int:
        return num_entering

    def returning(self, victims: list[Sequence]) -> list[Sequence]:
        return victims

    def split_off(self, sequence: Sequence) -> None:
        Samples([sequence])
        self.sequences.remove(sequence)

    def finish(self, sequence: Sequence, end: End) -> list[Sequence]:
        return [sequence]

    def commit(self, sequence: Sequence, row: "GroupRow", running_set: "RunningSet") -> GroupStep:
        raise AssertionError("a sample's next token is the one that was drawn")

    def restart(self) -> None:
        self.sequences = [sequence for sequence in self.sequences if sequence.status is not Status.FINISHED]
        self.waiting, self.host_copy = [], None
        for sequence in self.sequences:
            sequence.leave_device()
            sequence.num_computed = 0


def fork_len(sequences: Collection[Sequence]) -> int:
    """How many tokens siblings begin with that one of them computes for all, at least one: either all end there, or
    each has a token left that its logits come from (but where one has no other)."""
    outputs = [sequence.output_token_ids for sequence in sequences]
    first, last = min(outputs), max(outputs)
    common = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    if len(last) > common:
        common = min(common, min(map(len, outputs)) - 1)
    return max(1, len(next(iter(sequences)).prompt_token_ids) + common)
