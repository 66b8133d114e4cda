"""The sequences of one request: what they share on the device, and who goes with whom."""

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol, runtime_checkable

from jaxllm.engine.schedule.block_table import Places
from jaxllm.engine.schedule.sequence import End, Sequence, Status

if TYPE_CHECKING:
    from jaxllm.engine.schedule.running import RunningSet


@dataclass(eq=False, slots=True)
class HostCopy:
    """Blocks of preempted siblings in host memory."""

    key: int
    num_pages: int
    groups: list[int]  # of each block
    places: dict[Sequence, Places]  # of each that wants its blocks back: where they are among the copied ones


@runtime_checkable
class GroupRow(Protocol):
    """What a step says of a sequence whose next token its group chooses; the group alone reads it."""


class GroupStep(NamedTuple):
    """What a group makes of a step."""

    moved: list[Sequence]  # whose slots' rows are out of date
    end: End | None  # of all its sequences, if they end with this step


class SequenceGroup(ABC):
    """The sequences of one request. They share blocks, and leave the device together."""

    chooses_tokens: ClassVar[bool]  # the group, from what a step says of each of its sequences: see `commit`

    def __init__(self, sequences: list[Sequence]):
        self.sequences = sequences
        self.waiting: list[Sequence] = []  # for a slot, by arrival; the queue is its only writer
        self.host_copy: HostCopy | None = None  # of the blocks of those that were swapped out
        for sequence in sequences:
            sequence.group = self

    @abstractmethod
    def disband(self) -> None:
        """Lets go of its sequences, which are over, unless a step in flight may still ask who stands for them."""

    @property
    def on_device(self) -> list[Sequence]:
        """Those that have a slot."""
        return [sequence for sequence in self.sequences if sequence.slot >= 0]

    @property
    def num_full(self) -> int:
        """Of the sequences that have not ended, those that need the full sampler."""
        ongoing = (sequence for sequence in self.sequences if sequence.status is not Status.FINISHED)
        return sum(sequence.traits.needs_full_sampler for sequence in ongoing)

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
    def commit(self, sequence: Sequence, row: GroupRow, running_set: "RunningSet") -> GroupStep:
        """Takes what a step says of a sequence whose next token the group chooses. It is `HELD` until the others of the
        group have theirs."""

    @abstractmethod
    def take_back(self, sequence: Sequence) -> None:
        """What a step said of a held sequence that leaves the device is forgotten: it will compute that again."""

    @abstractmethod
    def restart(self) -> None:
        """Nothing of it is on the device any more: its sequences go back to their committed tokens."""


class Samples(SequenceGroup):
    """Sequences that are drawn independently of each other."""

    chooses_tokens = False

    def disband(self) -> None:
        self.sequences = []

    @property
    def live(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if sequence.status is not Status.FINISHED]

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

    def commit(self, sequence: Sequence, row: GroupRow, running_set: "RunningSet") -> GroupStep:
        raise AssertionError("a sample's next token is the one that was drawn")

    def take_back(self, sequence: Sequence) -> None:
        assert sequence.status is not Status.HELD

    def restart(self) -> None:
        self.sequences = [sequence for sequence in self.sequences if sequence.status is not Status.FINISHED]
        self.waiting, self.host_copy = [], None
        for sequence in self.sequences:
            sequence.leave_device()
            sequence.num_computed = 0


def fork_len(sequences: Collection[Sequence]) -> int:
    """How many tokens siblings begin with that one of them computes for all, at least one: either all end there, or
    each has a token left that its logits come from (but where one has no other). Those that are scored have all that
    their log-probabilities come from left."""
    outputs = [sequence.output_token_ids for sequence in sequences]
    first, last = min(outputs), max(outputs)
    common = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    if len(last) > common:
        common = min(common, min(map(len, outputs)) - 1)
    common += len(next(iter(sequences)).prompt_token_ids)
    scored = [sequence.num_skippable for sequence in sequences if sequence.targets is not None]
    return max(1, min([common, *scored]))
