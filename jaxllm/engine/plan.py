"""One step, as the scheduler hands it to the runner and gets it back."""

from dataclasses import dataclass, field
from typing import NamedTuple

from jaxllm.engine.request import Request

# In place of a token, where a row has none.
NOT_FINITE = -1  # the model's logits are NaN or infinite
NO_TOKEN = -2  # bias and masks leave no token


class Chunk(NamedTuple):
    """Known tokens `start` to `stop` of a request, and whether they reach its end, so that it samples."""

    request: Request
    start: int
    stop: int
    samples: bool


class NewBlock(NamedTuple):
    slot: int
    index: int  # in the slot's block table
    block: int


class Copy(NamedTuple):
    """A block's contents go to another block (copy-on-write)."""

    source: int
    target: int


class Swap(NamedTuple):
    """Blocks' contents go to host memory, or come back from it: into others, in the same order."""

    key: int  # of the host's copy, never used again
    blocks: list[int]


@dataclass(slots=True)
class Plan:
    """One step. Its rows are `decodes` (one token each, the slot's last), then `chunks`."""

    admitted: list[tuple[Request, int]] = field(default_factory=list)  # slot rows to install first, and their lengths
    decodes: list[Request] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    new_blocks: list[NewBlock] = field(default_factory=list)
    # What moves before the step, in this order; the blocks' contents are those that the step before left.
    swap_outs: list[Swap] = field(default_factory=list)
    swap_ins: list[Swap] = field(default_factory=list)  # the host's copy is given up
    copies: list[Copy] = field(default_factory=list)
    forgotten: list[int] = field(default_factory=list)  # keys of host copies that nobody will ask for
    num_tokens: int = 0
    num_samples: int = 0
    full_sampler: bool = False
    rows: list[Request] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)  # of each row's request, when planned

    def add_decode(self, request: Request) -> None:
        """Adds a row for the request's last token."""
        self.decodes.append(request)
        request.num_computed += 1
        request.num_in_flight += 1

    def add_chunk(self, request: Request, max_tokens: int) -> None:
        """Adds a row for at most `max_tokens` known tokens of the request."""
        start = request.num_computed
        stop = min(request.num_tokens, start + max_tokens)
        samples = stop == request.num_tokens
        self.chunks.append(Chunk(request, start, stop, samples))
        self.num_tokens += stop - start
        request.num_computed = stop
        request.num_in_flight += samples

    def remove_decode(self, request: Request) -> None:
        """Takes a request's row out again, if it has one. Linear, and rare."""
        if request in self.decodes:
            self.decodes.remove(request)
            self.new_blocks = [new for new in self.new_blocks if new.slot != request.slot]
            request.num_computed -= 1
            request.num_in_flight -= 1

    def seal(self) -> None:
        """No more rows: fixes their order, and the epochs that they belong to."""
        self.rows = self.decodes + [chunk.request for chunk in self.chunks]
        self.epochs = [request.epoch for request in self.rows]
        self.num_samples = len(self.decodes) + sum(chunk.samples for chunk in self.chunks)
