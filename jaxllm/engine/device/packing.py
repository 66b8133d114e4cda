"""What crosses from host to device, and the static shapes it may have: picked, padded and packed here only.

Each input is one int32 array, freshly allocated each time: the runtime may alias host memory, so an array that is in
flight is never written again.
"""

from bisect import bisect_left
from collections import abc
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from jaxllm.engine.schedule.plan import Plan, PooledSpan
from jaxllm.engine.schedule.sequence import Sequence

FROM_SLOT = -1  # as a token: the slot's last token, which the host may not know yet
ADMIT_SIZES = (1, 16)  # rows that one `admit` installs; more take several


def min_bucket(platform: str) -> int:
    """The smallest bucket on devices of `platform`. A TPU multiplies a single row with its vector unit, at a tenth of
    the speed that its memory allows: 8 rows take the matrix unit, and less time."""
    return 8 if platform == "tpu" else 1


def token_ladder(max_tokens: int, least: int = 1, *, free_padding: bool = False) -> tuple[int, ...]:
    """The token buckets, up to `max_tokens`: `least`, then 8 and its doublings (fewer rows cost a matrix unit as much);
    from 64 on, where each row costs, also the sizes half way, so that padding is at most a third of a step. With
    `free_padding` 8 and what is four times as much each: fewer executables to compile and to keep."""
    doublings = sample_ladder(max_tokens, least)
    if free_padding:
        return tuple(size for size in doublings if size in (least, max_tokens) or size.bit_length() % 2 == 0)
    half_way = (size * 3 // 2 for size in doublings if size >= 64)
    return tuple(sorted({*doublings, *(size for size in half_way if size < max_tokens)}))


def sample_ladder(max_samples: int, least: int = 1) -> tuple[int, ...]:
    """The buckets of samples, up to `max_samples`: `least`, then 8 and its doublings. A row costs a sampler little
    beside the head, which it reads for all rows, and each bucket takes four executables."""
    sizes, size = {min(least, max_samples), max_samples}, 8
    while size < max_samples:
        sizes.add(size)
        size *= 2
    return tuple(sorted(sizes))


def pool_ladder(max_tokens: int) -> tuple[int, ...]:
    """The sizes of steps, up to `max_tokens`, that hidden states are pooled of. Few: it is a small part of a step."""
    return tuple(sorted({max_tokens, *(max_tokens // by for by in (8, 64) if max_tokens // by >= 8)}))


def pick_bucket(sizes: abc.Sequence[int], n: int) -> int:
    """The smallest of the ascending `sizes` that holds `n`. ValueError if none does."""
    i = bisect_left(sizes, n)
    if i == len(sizes):
        raise ValueError(f"{n} exceeds the largest bucket {sizes[-1]}; the scheduler must cap it")
    return sizes[i]


class StepInput(NamedTuple):
    """A step's input, cut from its packed array. Rows are sequences, one-token rows first."""

    counts: np.ndarray  # [4]: one-token rows, rows, tokens, whether hidden states of all tokens are read
    slots: np.ndarray  # [seqs] slot of each row; padding has the first id past the table
    q_lens: np.ndarray  # [seqs] tokens of each row, 0 in padding
    tokens: np.ndarray  # [tokens] token ids, or FROM_SLOT
    shared: np.ndarray  # [4] or [0]: a `SharedPart`; where there is none, its slot is the first past the table
    new_blocks: np.ndarray  # [2 + pages, n]: slot, index of the block, its pages; padding has the first slot past


@dataclass(frozen=True)
class StepLayout:
    """Where the fields of a `StepInput` lie for one bucket."""

    tokens: int
    max_num_seqs: int
    block_size: int
    num_pages: int = 1  # of a block of all groups
    sharers: int = 1  # shards that may compute one prompt together in this step

    @property
    def seqs(self) -> int:
        return min(self.tokens, self.max_num_seqs)

    @property
    def max_new_blocks(self) -> int:
        return self.seqs + -(-self.sharers * self.tokens // self.block_size)

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        num_shared = 4 if self.sharers > 1 else 0
        sizes = (4, self.seqs, self.seqs, self.tokens, num_shared, (2 + self.num_pages) * self.max_new_blocks)
        return tuple(int(end) for end in np.cumsum(sizes))

    @property
    def size(self) -> int:
        return self._ends[-1]

    def unpack(self, packed):
        """The fields of `packed`, a numpy array (as views) or a traced one."""
        bounds = (0, *self._ends)
        *fields, new_blocks = (packed[a:b] for a, b in zip(bounds, self._ends, strict=False))
        return StepInput(*fields, new_blocks.reshape(2 + self.num_pages, -1))

    @cached_property
    def _padding(self) -> np.ndarray:
        packed = np.zeros(self.size, np.int32)
        fields = self.unpack(packed)
        fields.slots[:] = fields.new_blocks[0] = self.max_num_seqs
        fields.shared[:1] = self.max_num_seqs
        return packed

    def pack(self, plan: Plan) -> np.ndarray:
        """The packed input of `plan`. ValueError if it doesn't fit the bucket."""
        num_decodes, num_rows = len(plan.decodes), len(plan.rows)
        if plan.num_tokens > self.tokens or num_rows > self.seqs or len(plan.new_blocks) > self.max_new_blocks:
            raise ValueError(
                f"a plan of {plan.num_tokens} tokens, {num_rows} rows and {len(plan.new_blocks)} new blocks does not "
                f"fit the bucket of {self.tokens}, {self.seqs} and {self.max_new_blocks}"
            )
        packed = self._padding.copy()
        f = self.unpack(packed)
        f.counts[:] = (num_decodes, num_rows, plan.num_tokens, plan.reads_all)
        f.slots[:num_decodes] = plan.decode_slots
        f.q_lens[:num_decodes] = 1
        f.tokens[:num_decodes] = FROM_SLOT
        if plan.has_chosen:  # which the slots don't have
            f.tokens[:num_decodes] = [_known_token(sequence) for sequence in plan.decodes]
        at = num_decodes
        for row, chunk in enumerate(plan.chunks, start=num_decodes):
            tokens = [*chunk.sequence.token_ids(chunk.start, chunk.stop), *chunk.drafts]
            f.slots[row], f.q_lens[row] = chunk.sequence.slot, len(tokens)
            f.tokens[at : at + len(tokens)] = tokens
            at += len(tokens)
        if plan.shared is not None:
            f.shared[:] = plan.shared
        if plan.new_blocks:
            f.new_blocks[:, : len(plan.new_blocks)] = np.asarray(plan.new_blocks, np.int32).T
        return packed


def _known_token(sequence: Sequence) -> int:
    is_chosen = sequence.group.chooses_tokens and sequence.output_token_ids
    return sequence.output_token_ids[-1] if is_chosen else FROM_SLOT


class SampleInput(NamedTuple):
    """What a step samples, cut from its packed array."""

    tokens: np.ndarray  # [samples] the token of the step, counted flat, from whose logits each sample comes
    slots: np.ndarray  # [samples] the slot that it is for; padding has the first id past the table
    is_altered: np.ndarray  # [1] 1 if something has altered the logits already


@dataclass(frozen=True)
class SampleLayout:
    """Where the fields of a `SampleInput` lie for one bucket."""

    samples: int
    max_num_seqs: int

    @property
    def size(self) -> int:
        return 2 * self.samples + 1

    def unpack(self, packed):
        """The fields of `packed`, a numpy array (as views) or a traced one."""
        return SampleInput(packed[: self.samples], packed[self.samples : -1], packed[-1:])

    def is_sample(self, given: SampleInput) -> Any:
        """[samples] False for what pads them, which comes last."""
        return given.slots < self.max_num_seqs

    @cached_property
    def _padding(self) -> np.ndarray:
        packed = np.zeros(self.size, np.int32)
        self.unpack(packed).slots[:] = self.max_num_seqs
        return packed

    @cached_property
    def _first(self) -> np.ndarray:
        return np.arange(self.samples, dtype=np.int32)

    def pack(self, plan: Plan, *, is_altered: bool = False) -> np.ndarray:
        """The packed samples of `plan`. ValueError if they don't fit the bucket."""
        if plan.num_samples > self.samples:
            raise ValueError(f"{plan.num_samples} samples do not fit the bucket of {self.samples}")
        if plan.drafts:
            raise ValueError(f"{len(plan.drafts)} drafts are to be verified, and no sampler does; propose none")
        packed, num_decodes = self._padding.copy(), len(plan.decodes)
        f = self.unpack(packed)
        f.tokens[:num_decodes], f.slots[:num_decodes] = self._first[:num_decodes], plan.decode_slots
        if plan.num_samples > num_decodes:
            f.slots[num_decodes : plan.num_samples] = [sequence.slot for sequence in plan.samples[num_decodes:]]
            f.tokens[num_decodes : plan.num_samples] = plan.sample_tokens[num_decodes:]
        if is_altered:
            f.is_altered[:] = 1
        return packed


class PoolInput(NamedTuple):
    """Which of a step's hidden states are summed, cut from a packed array. Rows are sequences that are pooled."""

    slots: np.ndarray  # [rows]; padding has the first id past the table
    starts: np.ndarray  # [rows] the first token, counted flat
    stops: np.ndarray  # [rows] the token after the last
    begins: np.ndarray  # [rows] 1 if nothing was summed before
    shares: np.ndarray  # [rows] the weight of the whole sum; the bits of a float32


@dataclass(frozen=True)
class PoolLayout:
    """Where the fields of a `PoolInput` lie for steps of at most so many tokens."""

    tokens: int
    max_num_seqs: int

    @property
    def rows(self) -> int:
        return min(self.tokens, self.max_num_seqs)

    @property
    def size(self) -> int:
        return len(PoolInput._fields) * self.rows

    def unpack(self, packed) -> PoolInput:
        """The fields of `packed`, a numpy array (as views) or a traced one."""
        return PoolInput(*packed.reshape(len(PoolInput._fields), self.rows))

    def pack(self, spans: abc.Sequence[PooledSpan]) -> np.ndarray:
        """The packed rows of `spans`."""
        packed = np.zeros(self.size, np.int32)
        f = self.unpack(packed)
        f.slots[:] = self.max_num_seqs
        n = len(spans)
        f.slots[:n] = [span.sequence.slot for span in spans]
        f.starts[:n], f.stops[:n] = [span.start for span in spans], [span.stop for span in spans]
        f.begins[:n] = [span.begins for span in spans]
        f.shares[:n] = np.asarray([span.share for span in spans], np.float32).view(np.int32)
        return packed
