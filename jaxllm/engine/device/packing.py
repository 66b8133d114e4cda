"""What crosses from host to device, and the static shapes it may have: picked, padded and packed here only.

A step's input is one int32 array, freshly allocated each time: the runtime may alias host memory, so an array that
is in flight is never written again.
"""

from bisect import bisect_left
from collections import Counter, abc
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from jaxllm.engine.schedule.plan import Plan
from jaxllm.engine.schedule.sequence import Sequence
from jaxllm.sampling_params import BAD_WORD_LEN, MAX_BAD_WORDS, MAX_LOGPROB_TOKEN_IDS

FROM_SLOT = -1  # as a token: the slot's last token, which the host may not know yet
ADMIT_SIZES = (1, 16)  # rows that one `admit` installs; more take several
NUM_STOP_IDS = 32
NUM_BAD_WORDS = 2 * MAX_BAD_WORDS  # each with and without a space before it
PENALTY_IDS = 512  # token ids that one `penalties` call writes; more take several


def token_ladder(max_tokens: int) -> tuple[int, ...]:
    """The token buckets, up to `max_tokens`: 1, then 8 and its doublings (fewer rows cost a matrix unit as much); from
    64 on, where each row costs, also the sizes half way, so that padding is at most a third of a step."""
    sizes, size = {1, max_tokens}, 8
    while size < max_tokens:
        sizes.update((size, size * 3 // 2) if size >= 64 else (size,))
        size *= 2
    return tuple(sorted(size for size in sizes if size <= max_tokens))


def pick_bucket(sizes: abc.Sequence[int], n: int) -> int:
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
    sample_rows: np.ndarray  # [seqs] the row from whose last token each sample comes
    sample_slots: np.ndarray  # [seqs] the slot that it is for; padding has the first id past the table
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
        sizes = (3, *[self.seqs] * 4, self.tokens, 3 * self.max_new_blocks)
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
        num_decodes, num_rows = len(plan.decodes), max(len(plan.rows), plan.num_samples)
        if plan.num_tokens > self.tokens or num_rows > self.seqs or len(plan.new_blocks) > self.max_new_blocks:
            raise ValueError(
                f"a plan of {plan.num_tokens} tokens, {num_rows} rows or samples and {len(plan.new_blocks)} new "
                f"blocks does not fit the bucket of {self.tokens}, {self.seqs} and {self.max_new_blocks}"
            )
        packed = np.zeros(self.size, np.int32)
        f = self.unpack(packed)
        f.counts[:] = (num_decodes, len(plan.rows), plan.num_tokens)
        f.slots[:] = f.sample_slots[:] = self.max_num_seqs
        f.slots[:num_decodes] = f.sample_slots[:num_decodes] = plan.decode_slots
        f.slots[num_decodes : len(plan.rows)] = [chunk.sequence.slot for chunk in plan.chunks]
        others = slice(num_decodes, plan.num_samples)  # samples that are no decode's
        f.sample_slots[others] = [sequence.slot for sequence in plan.samples[num_decodes:]]
        f.sample_rows[:num_decodes] = np.arange(num_decodes)
        f.sample_rows[others] = plan.sample_rows[num_decodes:]
        f.q_lens[:num_decodes] = 1
        f.tokens[:num_decodes] = FROM_SLOT
        if plan.has_beams:  # whose tokens the host has chosen
            f.tokens[:num_decodes] = [_known_token(sequence) for sequence in plan.decodes]
        at = num_decodes
        for row, chunk in enumerate(plan.chunks, start=num_decodes):
            tokens = chunk.sequence.token_ids(chunk.start, chunk.stop)
            f.q_lens[row] = len(tokens)
            f.tokens[at : at + len(tokens)] = tokens
            at += len(tokens)
        f.new_blocks[0] = self.max_num_seqs
        if plan.new_blocks:
            f.new_blocks[:, : len(plan.new_blocks)] = np.asarray(plan.new_blocks, np.int32).T
        return packed


def _known_token(sequence: Sequence) -> int:
    return sequence.output_token_ids[-1] if sequence.is_beam and sequence.output_token_ids else FROM_SLOT


class SlotRow(NamedTuple):
    """A whole row of the slot table, cut from a packed `admit` array `[rows, size]`."""

    slot: np.ndarray  # [rows], padding has the first id past the table
    length: np.ndarray  # [rows] tokens whose keys and values are in the pool
    last_token: np.ndarray  # [rows] the last known token
    sample_index: np.ndarray  # [rows]
    top_k: np.ndarray  # [rows], 0 for all
    min_len: np.ndarray  # [rows] tokens, prompt included, before which stop ids are masked
    alters_logits: np.ndarray  # [rows] 1 if the penalties' row counts
    wants_logprobs: np.ndarray  # [rows] 1 or 0
    is_beam: np.ndarray  # [rows] 1 or 0
    floats: np.ndarray  # [rows, 6] bits of temperature, top_p, min_p; repetition, frequency and presence penalty
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
        return 9 + 6 + 2 + NUM_STOP_IDS + self.blocks_per_seq

    def unpack(self, packed) -> SlotRow:
        bounds = np.cumsum([9, 6, 2, NUM_STOP_IDS]).tolist()
        starts = zip(bounds, [*bounds[1:], self.size], strict=True)
        return SlotRow(*(packed[:, i] for i in range(9)), *(packed[:, a:b] for a, b in starts))

    def pack(self, admitted: abc.Sequence[tuple[Sequence, int]]) -> np.ndarray:
        """The packed rows of sequences, each with the number of its tokens that the pool holds already."""
        packed = np.zeros((self.rows, self.size), np.int32)
        packed[:, 0] = self.max_num_seqs
        for i, (sequence, length) in enumerate(admitted):
            if sequence.packed_params is None:
                sequence.packed_params = _packed_params(sequence)
            last_token = sequence.token_ids(sequence.num_tokens - 1, sequence.num_tokens)[0]
            table = 3 + len(sequence.packed_params)
            packed[i, :3] = sequence.slot, length, last_token
            packed[i, 3:table] = sequence.packed_params
            packed[i, table : table + len(sequence.table)] = sequence.table.ids
        return packed


def _packed_params(sequence: Sequence) -> np.ndarray:
    """The fields of its `SlotRow` from `sample_index` to `stop_ids`, which never change."""
    params, seed = sequence.params, sequence.seed % 2**64
    temperature = 0.0 if sequence.is_beam else params.temperature  # nothing is drawn for a beam
    floats = (
        temperature,
        params.top_p,
        params.min_p,
        params.repetition_penalty,
        params.frequency_penalty,
        params.presence_penalty,
    )
    ints = (
        sequence.sample_index,
        max(params.top_k, 0),
        min(len(sequence.prompt_token_ids) + params.min_tokens, 2**31 - 1),
        params.alters_logits,
        params.tracks_logprobs,
        sequence.is_beam,
    )
    stop_ids = np.full(NUM_STOP_IDS, -1, np.int32)
    stop_ids[: len(sequence.stop_ids)] = sorted(sequence.stop_ids)
    bits = [np.array(floats, np.float32), np.array([seed >> 32, seed % 2**32], np.uint32)]
    return np.concatenate([np.array(ints, np.int32), *(part.view(np.int32) for part in bits), stop_ids])


class PenaltyRow(NamedTuple):
    """A part of one slot's row of the `PenaltyState`, cut from a packed array."""

    slot: np.ndarray  # [1]
    is_first: np.ndarray  # [1] 1 if the row is to be emptied before
    fill: np.ndarray  # [1] bits of the bias of tokens that are not listed
    recent: np.ndarray  # [BAD_WORD_LEN - 1] last output tokens, padded with -1 in front
    logprob_ids: np.ndarray  # [MAX_LOGPROB_TOKEN_IDS] padded with 0
    bad_words: np.ndarray  # [NUM_BAD_WORDS, BAD_WORD_LEN], each padded with -1 in front
    ids: np.ndarray  # [PENALTY_IDS] tokens of which the next three tell; padding lies past the vocabulary
    bias: np.ndarray  # [PENALTY_IDS] bits
    output_counts: np.ndarray  # [PENALTY_IDS]
    in_prompt: np.ndarray  # [PENALTY_IDS] 1 or 0


@dataclass(frozen=True)
class PenaltyLayout:
    """Where the fields of an `PenaltyRow` lie."""

    vocab: int

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        words = NUM_BAD_WORDS * BAD_WORD_LEN
        sizes = (1, 1, 1, BAD_WORD_LEN - 1, MAX_LOGPROB_TOKEN_IDS, words, *[PENALTY_IDS] * 4)
        return tuple(int(end) for end in np.cumsum(sizes))

    @property
    def size(self) -> int:
        return self._ends[-1]

    def unpack(self, packed) -> PenaltyRow:
        bounds = (0, *self._ends)
        row = PenaltyRow(*(packed[a:b] for a, b in zip(bounds, self._ends, strict=False)))
        return row._replace(bad_words=row.bad_words.reshape(NUM_BAD_WORDS, BAD_WORD_LEN))

    def pack(self, sequence: Sequence) -> list[np.ndarray]:
        """The packed arrays that install a sequence's row, one after the other."""
        params, output = sequence.params, sequence.output_token_ids
        counts = Counter(output) if params.penalizes else Counter()
        prompt = set(sequence.prompt_token_ids) if params.penalizes else set()
        ids = sorted(prompt.union(counts, params.logit_bias, params.allowed_token_ids or ()))
        allowed = None if params.allowed_token_ids is None else set(params.allowed_token_ids)
        fill = 0.0 if allowed is None else -np.inf
        bias = [params.logit_bias.get(i, 0.0) if allowed is None or i in allowed else -np.inf for i in ids]
        columns = (ids, np.array(bias, np.float32).view(np.int32), [counts[i] for i in ids], [i in prompt for i in ids])
        parts = []
        for at in range(0, max(1, len(ids)), PENALTY_IDS):
            packed = np.zeros(self.size, np.int32)
            f = self.unpack(packed)
            f.slot[:], f.is_first[:], f.fill[:] = sequence.slot, at == 0, np.float32(fill).view(np.int32)
            f.recent[:] = ([-1] * BAD_WORD_LEN + output)[1 - BAD_WORD_LEN :]
            f.logprob_ids[: len(params.logprob_token_ids or ())] = params.logprob_token_ids or ()
            f.bad_words[:] = -1
            for word, tokens in zip(f.bad_words, sequence.bad_words, strict=False):
                word[-len(tokens) :] = tokens
            f.ids[:] = self.vocab
            for field, column in zip((f.ids, f.bias, f.output_counts, f.in_prompt), columns, strict=True):
                part = column[at : at + PENALTY_IDS]
                field[: len(part)] = part
            parts.append(packed)
        return parts
