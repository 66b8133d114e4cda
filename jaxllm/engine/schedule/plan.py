"""One step, as the scheduler hands it to the runner and gets it back."""

from array import array
from collections import abc
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from jaxllm.engine.schedule.block_table import Copy
from jaxllm.engine.schedule.decode_batch import DecodeBatch
from jaxllm.engine.schedule.sequence import Sequence

# In place of a token, where a row has none.
NOT_FINITE = -1  # the model's logits are NaN or infinite
NO_TOKEN = -2  # bias and masks leave no token
NOT_ACCEPTED = -3  # it was drawn after a draft that is not the sequence's token, as are those after it
NOT_FINITE_POOLED = "the model's hidden states are not finite (NaN or infinity)"
NO_TOKEN_ERRORS = {
    NOT_FINITE: "the model's logits are not finite (NaN or infinity)",
    NO_TOKEN: "allowed_token_ids, bad_words, logit_bias, min_tokens and structured_outputs together leave no token to "
    "generate; loosen one",
}


class Chunk(NamedTuple):
    """Known tokens `start` to `stop` of a sequence, then `drafts`: guesses of those that come next. Tokens are drawn
    after the last of the known ones, if they reach its end and it generates, and after each draft."""

    sequence: Sequence
    start: int
    stop: int
    num_samples: int
    drafts: abc.Sequence[int] = ()

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start + len(self.drafts)


class PooledSpan(NamedTuple):
    """Tokens of a step, counted flat from `start` to `stop`, whose hidden states are added to a sequence's sum."""

    sequence: Sequence
    epoch: int  # of the sequence
    start: int
    stop: int
    begins: bool  # whether nothing was added before
    ends: bool  # whether the sum is complete
    share: float  # by which the whole sum is multiplied


class Swap(NamedTuple):
    """Pages' contents go to host memory, or come back from it: into others, in the same order."""

    key: int  # of the host's copy, never used again
    pages: list[int]


class SharedPart(NamedTuple):
    """What is the shard's of a prompt that all shards compute: the last of the plan's chunks, if it is any token."""

    slot: int
    start: int  # the first of the prompt's tokens that is computed here
    begin: int  # from where, and up to which, the shards together compute it in this step: whole blocks
    end: int


@dataclass(slots=True)
class Plan:
    """One step. Its rows are `decodes` (one token each, the slot's last), then `chunks`; it may have none, and only
    move or install something. `samples` are the sequences that get a token, each from the logits of some row: one whose
    drafts are verified has several, one after the other."""

    # What moves before the step, in this order; the blocks' contents are those that the step before left.
    swap_outs: list[Swap] = field(default_factory=list)
    swap_ins: list[Swap] = field(default_factory=list)  # the host's copy is given up
    copies: list[Copy] = field(default_factory=list)
    released_copies: list[int] = field(default_factory=list)  # keys of host copies to drop
    admitted: list[tuple[Sequence, int]] = field(default_factory=list)  # slot rows to install first, and their lengths
    rules: list[Sequence] = field(default_factory=list)  # of those: their rows of the `LogitRules` are to be written
    decodes: list[Sequence] = field(default_factory=list)
    decode_slots: array = field(default_factory=lambda: array("i"))  # of each
    num_steady: int = 0  # of the decodes, the first ones: rows of the decode batch
    batch: DecodeBatch | None = None  # that they are of
    batch_step: int = 0  # which of its steps this is
    kept_logprobs: set[int] = field(default_factory=set)  # what samples keep, as `Sequence.num_logprobs` has it
    chunks: list[Chunk] = field(default_factory=list)
    forks: list[tuple[Sequence, Sequence]] = field(default_factory=list)  # one that samples, another from its logits
    new_blocks: list[tuple[int, ...]] = field(default_factory=list)  # slot, index in its block table, and pages
    max_tokens: int = 0  # that it may have
    num_tokens: int = 0
    num_wanted: int = 0  # of tokens, at least, that the step would have if it could be larger
    num_sequences: int = 0  # that run or wait: as many may come to decode together
    params_version: int = 0  # of the parameters that it is computed with
    awaits_masks: bool = False  # which its sampling needs, and which come after the forward pass
    num_samples: int = 0
    full_sampler: bool = False
    alters_logits: bool = False  # perhaps, apart from masks of grammars
    has_chosen: bool = False  # perhaps: sequences whose groups choose their tokens
    rows: list[Sequence] = field(default_factory=list)
    samples: list[Sequence] = field(default_factory=list)
    sample_tokens: abc.Sequence[int] = ()  # the token, counted flat, whose logits each comes from
    pooled: list[PooledSpan] = field(default_factory=list)  # of rows without samples
    drafts: dict[int, int] = field(default_factory=dict)  # by sample, of those after a sequence's first: the draft
    epochs: list[int] = field(default_factory=list)  # of each, when planned
    shared: SharedPart | None = None

    @property
    def reads_all(self) -> bool:
        """Whether hidden states of other tokens are read, too, than each row's last one."""
        return bool(self.pooled) or any(
            chunk.drafts or chunk.sequence.targets is not None or chunk.sequence.wants_prompt_logprobs
            for chunk in self.chunks
        )

    def install(self, sequence: Sequence) -> None:
        """Writes the sequence's whole row of the slot table before the step."""
        self.admitted.append((sequence, sequence.num_computed))
        if sequence.traits.has_rules and not sequence.has_rules:
            self.rules.append(sequence)
            sequence.has_rules = True

    def add_block(self, sequence: Sequence, index: int) -> None:
        """Tells the device of a block that has come to the sequence's table, in all groups."""
        self.new_blocks.append((sequence.slot, index, *sequence.table.pages(index)))

    def add_batch(self, batch: DecodeBatch) -> None:
        """Adds a row for the last token of each of its sequences, before any other."""
        assert not self.decodes
        self.decodes, self.decode_slots, self.epochs = batch.columns()
        self.num_tokens = self.num_samples = self.num_steady = len(batch)
        batch.advance()
        self.batch, self.batch_step, self.kept_logprobs = batch, batch.num_steps, batch.kept_logprobs

    def add_decode(self, sequence: Sequence) -> None:
        """Adds a row for the sequence's last token."""
        if len(self.decodes) == self.num_steady:  # they are the batch's columns
            self.decodes, self.decode_slots = self.decodes.copy(), self.decode_slots[:]
        self.decodes.append(sequence)
        self.decode_slots.append(sequence.slot)
        self.num_tokens += 1
        self.num_samples += 1
        sequence.num_computed += 1

    def add_chunk(self, sequence: Sequence, max_tokens: int) -> None:
        """Adds a row for at most `max_tokens` known tokens of the sequence."""
        self.chunks.append(Chunk(sequence, sequence.num_computed, *self._compute(sequence, max_tokens)))

    def extend_chunk(self, index: int, max_tokens: int) -> None:
        """Adds at most `max_tokens` more to a chunk that does not sample."""
        sequence, start, *_ = self.chunks[index]
        self.chunks[index] = Chunk(sequence, start, *self._compute(sequence, max_tokens))

    def _compute(self, sequence: Sequence, max_tokens: int) -> tuple[int, int]:
        """Where a chunk of the sequence stops, and how many samples it has there."""
        start = sequence.num_computed
        stop = min(sequence.num_tokens, start + max_tokens)
        num_samples = int(stop == sequence.num_tokens and sequence.generates)
        self.num_tokens += stop - start
        self.num_samples += num_samples
        sequence.num_computed = stop
        return stop, num_samples

    def add_part(self, sequence: Sequence, start: int, stop: int, end: int) -> None:
        """Adds tokens `start` to `stop` of a prompt which the shards together compute up to `end`."""
        self.shared = SharedPart(sequence.slot, start, sequence.num_computed, end)
        if stop > start:
            self.chunks.append(Chunk(sequence, start, stop, 0))
            self.num_tokens += stop - start
        sequence.num_computed = end

    def add_fork(self, parent: Sequence, sequence: Sequence) -> None:
        """Lets another sequence sample from the logits of the parent's row."""
        self.forks.append((parent, sequence))
        self.num_samples += 1

    def add_drafts(self, drafts: abc.Mapping[Sequence, abc.Sequence[int]]) -> None:
        """Lets sequences whose decode was added go on with guesses of the tokens after it. `Scheduler.commit` takes
        back those that are not accepted."""
        if not drafts:
            return
        for sequence, guesses in drafts.items():
            stop = sequence.num_computed
            self.chunks.append(Chunk(sequence, stop - 1, stop, 1 + len(guesses), guesses))
            self.num_tokens += len(guesses)
            self.num_samples += len(guesses)
            sequence.num_computed += len(guesses)
        decodes = [sequence for sequence in self.decodes[self.num_steady :] if sequence not in drafts]
        self.decodes[self.num_steady :] = decodes
        self.decode_slots[self.num_steady :] = array("i", [sequence.slot for sequence in decodes])

    def seal(self) -> None:
        """Fixes the order of rows and samples, and the samples' epochs: no row is added after this."""
        self.rows = self.samples = self.decodes
        self.sample_tokens = range(len(self.decodes))
        if self.chunks or self.forks:
            self._add_others()
        others = self.samples[self.num_steady :]
        if others:
            self.epochs = self.epochs + [sequence.epoch for sequence in others]
            self.kept_logprobs.update(sequence.num_logprobs for sequence in others)

    def _add_others(self) -> None:
        """Appends the rows and samples of chunks, and the samples of forks."""
        self.rows = self.decodes + [chunk.sequence for chunk in self.chunks]
        samples, sample_tokens = self.decodes.copy(), list(self.sample_tokens)
        last = len(self.decodes) - 1
        for chunk in self.chunks:
            if chunk.sequence.pooling is not None and (span := _pooled_span(chunk, last + 1)) is not None:
                self.pooled.append(span)
            last += chunk.num_tokens
            sample_tokens += range(last + 1 - chunk.num_samples, last + 1)
            samples += [chunk.sequence] * chunk.num_samples
            self.drafts.update(enumerate(chunk.drafts, start=len(samples) - len(chunk.drafts)))
        if self.forks:
            first = self.num_steady  # who is one of the batch has no forks
            token_of = dict(zip(samples[first:], sample_tokens[first:], strict=True))
            for parent, sequence in self.forks:
                samples.append(sequence)
                sample_tokens.append(token_of[parent])
        self.samples, self.sample_tokens = samples, sample_tokens

    @property
    def shards(self) -> tuple["Plan", ...]:
        """Of each shard its plan: there is one shard."""
        return (self,)

    @property
    def most_tokens(self) -> int:
        """Of a shard."""
        return self.num_tokens

    @property
    def most_samples(self) -> int:
        return self.num_samples

    @property
    def has_swaps(self) -> bool:
        """Whether blocks go to host memory, or come back."""
        return bool(self.swap_outs or self.swap_ins)

    @property
    def has_moves(self) -> bool:
        """Whether blocks move before the step."""
        return self.has_swaps or bool(self.copies or self.released_copies)

    @property
    def is_empty(self) -> bool:
        return not (self.num_tokens or self.admitted or self.swap_outs or self.shared)


class ShardedPlan:
    """One step of several shards of data; who idles has an empty plan."""

    def __init__(self, shards: abc.Sequence[Plan]):
        self.shards = tuple(shards)
        self.num_wanted = self.num_sequences = 0  # as in `Plan`, of a shard
        self.awaits_masks = False  # as in `Plan`
        self.num_tokens = sum(plan.num_tokens for plan in shards)
        self.num_samples = sum(plan.num_samples for plan in shards)
        self.most_tokens = max(plan.num_tokens for plan in shards)
        self.most_samples = max(plan.num_samples for plan in shards)
        self.full_sampler = any(plan.full_sampler for plan in shards)
        self.alters_logits = any(plan.alters_logits for plan in shards)
        self.has_chosen = any(plan.has_chosen for plan in shards)
        self.kept_logprobs = set().union(*(plan.kept_logprobs for plan in shards))
        self.admitted = [admitted for plan in shards for admitted in plan.admitted]
        self.pooled = [span for plan in shards for span in plan.pooled]
        self.shared = shards[0].shared  # of all, or of none

    @property
    def has_swaps(self) -> bool:
        """Whether blocks go to host memory, or come back."""
        return any(plan.has_swaps for plan in self.shards)

    @cached_property
    def rows(self) -> list[Sequence]:
        """Those of one shard after the other, as all that is here."""
        return [sequence for plan in self.shards for sequence in plan.rows]

    @cached_property
    def samples(self) -> list[Sequence]:
        return [sequence for plan in self.shards for sequence in plan.samples]


StepPlan = Plan | ShardedPlan


def _pooled_span(chunk: Chunk, first: int) -> PooledSpan | None:
    """What a chunk whose first token is the step's `first` adds to its sequence's sum; None if nothing."""
    sequence, start, stop, *_ = chunk
    length, num_tokens = len(sequence.prompt_token_ids), stop - start
    begins, ends, share = start == 0, stop == length, 1.0
    match sequence.pooling:
        case "mean":
            share = 1 / length
        case "cls":
            num_tokens = int(begins)
            if not (begins or ends):
                return None
        case _:
            first, num_tokens, begins = first + num_tokens - 1, 1, True
            if not ends:
                return None
    return PooledSpan(sequence, sequence.epoch, first, first + num_tokens, begins, ends, share)
