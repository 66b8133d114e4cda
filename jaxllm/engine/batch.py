"""What crosses from host to device, and the static shapes it may have: picked, padded and packed here only.

A step's input is one int32 array, freshly allocated each time: the runtime may alias host memory, so an array that
is in flight is never written again.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from jaxllm.engine.plan import Plan
from jaxllm.engine.request import Request

FROM_SLOT = -1  # as a token: the slot's last token, which the host may not know yet
ADMIT_SIZES = (1, 16)  # rows that one `admit` installs; more take several
NUM_STOP_IDS = 32


def token_ladder(max_tokens: int) -> tuple[int, ...]:
    """The token buckets: 1, then 8 and its doublings (fewer rows cost a matrix unit as much), up to `max_tokens`."""
    sizes = [1]
    while sizes[-1] < max_tokens:
        sizes.append(min(max(8, 2 * sizes[-1]), max_tokens))
    return tuple(sizes)


def pick_bucket(sizes: Sequence[int], n: int) -> int:
    """The smallest of the ascending `sizes` that holds `n`. ValueError if none does."""
    i = bisect_left(sizes, n)
    if i == len(sizes):
        raise ValueError(f"{n} exceeds the largest bucket {sizes[-1]}; the scheduler must cap it")
    return sizes[i]


class StepInput(NamedTuple):
    """A step's input, cut from its packed array. Rows are sequences, one-token rows first."""

    counts: np.ndarray  # [3]: one-token rows, rows, tokens
    slots: np.ndarray  # [seqs] slot of each row; padding has the first id past the table
    q_lens: np.ndarray  # [seqs] tokens of each row, 0 in padding
    samples: np.ndarray  # [seqs] 1 where the row's last token is its sequence's last
    tokens: np.ndarray  # [tokens] token ids, or FROM_SLOT
    new_blocks: np.ndarray  # [3, n]: slot, index in its block table, block; padding has the first slot past


@dataclass(frozen=True)
class StepLayout:
    """Where the fields of a `StepInput` lie for one bucket."""

    tokens: int
    max_num_seqs: int
    block_size: int

    @property
    def seqs(self) -> int:
        return min(self.tokens, self.max_num_seqs)

    @property
    def max_new_blocks(self) -> int:
        return self.seqs + -(-self.tokens // self.block_size)

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        sizes = (3, self.seqs, self.seqs, self.seqs, self.tokens, 3 * self.max_new_blocks)
        return tuple(int(end) for end in np.cumsum(sizes))

    @property
    def size(self) -> int:
        return self._ends[-1]

    def unpack(self, packed):
        """The fields of `packed`, a numpy array (as views) or a traced one."""
        bounds = (0, *self._ends)
        *fields, new_blocks = (packed[a:b] for a, b in zip(bounds, self._ends, strict=False))
        return StepInput(*fields, new_blocks.reshape(3, -1))

    def pack(self, plan: Plan) -> np.ndarray:
        """The packed input of `plan`. ValueError if it doesn't fit the bucket."""
        num_decodes, num_rows = len(plan.decodes), len(plan.rows)
        if plan.num_tokens > self.tokens or num_rows > self.seqs or len(plan.new_blocks) > self.max_new_blocks:
            raise ValueError(
                f"a plan of {plan.num_tokens} tokens, {num_rows} rows and {len(plan.new_blocks)} new blocks "
                f"does not fit the bucket of {self.tokens}, {self.seqs} and {self.max_new_blocks}"
            )
        packed = np.zeros(self.size, np.int32)
        f = self.unpack(packed)
        f.counts[:] = (num_decodes, num_rows, plan.num_tokens)
        f.slots[:] = self.max_num_seqs
        f.slots[:num_rows] = [request.slot for request in plan.rows]
        f.q_lens[:num_decodes] = 1
        f.samples[:num_decodes] = 1
        f.tokens[:num_decodes] = FROM_SLOT
        at = num_decodes
        for row, chunk in enumerate(plan.chunks, start=num_decodes):
            tokens = chunk.request.token_ids(chunk.start, chunk.stop)
            f.q_lens[row] = len(tokens)
            f.samples[row] = chunk.samples
            f.tokens[at : at + len(tokens)] = tokens
            at += len(tokens)
        f.new_blocks[0] = self.max_num_seqs
        if plan.new_blocks:
            f.new_blocks[:, : len(plan.new_blocks)] = np.asarray(plan.new_blocks, np.int32).T
        return packed


class SlotRow(NamedTuple):
    """A whole row of the slot table, cut from a packed `admit` array `[rows, size]`."""

    slot: np.ndarray  # [rows], padding has the first id past the table
    length: np.ndarray  # [rows] tokens whose keys and values are in the pool
    last_token: np.ndarray  # [rows] the last known token
    sample_index: np.ndarray  # [rows]
    top_k: np.ndarray  # [rows], 0 for all
    min_len: np.ndarray  # [rows] tokens, prompt included, before which stop ids are masked
    floats: np.ndarray  # [rows, 3] bits of temperature, top_p, min_p
    seed: np.ndarray  # [rows, 2] high and low word
    stop_ids: np.ndarray  # [rows, NUM_STOP_IDS], padded with -1
    block_table: np.ndarray  # [rows, blocks_per_seq], padded with 0


@dataclass(frozen=True)
class AdmitLayout:
    """Where the fields of `rows` slot rows lie."""

    rows: int
    max_num_seqs: int
    blocks_per_seq: int

    @property
    def size(self) -> int:
        return 6 + 3 + 2 + NUM_STOP_IDS + self.blocks_per_seq

    def unpack(self, packed) -> SlotRow:
        bounds = np.cumsum([6, 3, 2, NUM_STOP_IDS]).tolist()
        starts = zip(bounds, [*bounds[1:], self.size], strict=True)
        return SlotRow(*(packed[:, i] for i in range(6)), *(packed[:, a:b] for a, b in starts))

    def pack(self, admitted: Sequence[tuple[Request, int]]) -> np.ndarray:
        """The packed rows of requests, each with the number of its tokens that the pool holds already."""
        packed = np.zeros((self.rows, self.size), np.int32)
        f = self.unpack(packed)
        f.slot[:] = self.max_num_seqs
        f.stop_ids[:] = -1
        for i, (request, length) in enumerate(admitted):
            params = request.params
            packed[i, :6] = (
                request.slot, length, request.token_ids(request.num_tokens - 1, request.num_tokens)[0],
                request.sample_index, max(params.top_k, 0),
                min(len(request.prompt_token_ids) + params.min_tokens, 2**31 - 1),
            )  # fmt: skip
            f.floats[i] = np.array([params.temperature, params.top_p, params.min_p], np.float32).view(np.int32)
            seed = request.seed % 2**64
            f.seed[i] = np.array([seed >> 32, seed % 2**32], np.uint32).view(np.int32)
            f.stop_ids[i, : len(request.stop_ids)] = sorted(request.stop_ids)
            f.block_table[i, : len(request.block_ids)] = request.block_ids
        return packed
