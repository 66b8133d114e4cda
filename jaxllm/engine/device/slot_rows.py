"""Rows of the slot table as they cross to the device: packed when a sequence is admitted."""

import itertools
from collections import abc
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from jaxllm.engine.config import EngineConfig
from jaxllm.engine.device.state import SAMPLING_LAYOUT, SamplingTable
from jaxllm.engine.schedule.block_table import BlockTable
from jaxllm.engine.schedule.cache_groups import CacheGroup
from jaxllm.engine.schedule.sequence import Sequence


class SlotRow(NamedTuple):
    """Whole rows of the slot table, cut from a packed `admit` array `[rows, size]`."""

    slot: Any  # [rows], padding has the first id past the table
    length: Any  # [rows] tokens whose keys and values are in the pool
    last_token: Any  # [rows] the last known token
    sampling: SamplingTable  # [rows, ...] of each column
    block_tables: Any  # of each group [rows, pages of a block, width], padded with 0


class TableShape(NamedTuple):
    """Of a group's block tables on the device, which are rings: block i of a sequence is at i modulo `width`."""

    group: CacheGroup
    width: int
    view: int  # blocks that a step reads of it, from the first that its tokens read

    @property
    def shape(self) -> tuple[int, int]:
        """Of a slot's: pages of a block, and width."""
        return self.group.num_pages, self.width


def table_shapes(config: EngineConfig) -> tuple[TableShape, ...]:
    """Of each group. The first group's tables are no shorter than a sequence: the token history goes by them."""
    shapes, longest = [], config.blocks_per_seq
    for group in config.groups:
        most = group.most_blocks(config.max_num_batched_tokens, config.block_size)
        view = longest if most is None else min(most, longest)
        shapes.append(TableShape(group, view if shapes else longest, view))
    return tuple(shapes)


@dataclass(frozen=True)
class AdmitLayout:
    """Where the fields of `rows` slot rows lie."""

    rows: int
    max_num_seqs: int
    tables: tuple[tuple[int, int], ...]  # of each group: pages of a block, and the width of a slot's block table

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        """Of each group's block table."""
        sizes = [num_pages * width for num_pages, width in self.tables]
        return tuple(int(end) for end in np.cumsum([3 + SAMPLING_LAYOUT.size, *sizes]))

    @property
    def size(self) -> int:
        return self._ends[-1]

    def unpack(self, packed) -> SlotRow:
        sampling = SAMPLING_LAYOUT.unpack(self.sampling_rows(packed))
        return SlotRow(packed[:, 0], packed[:, 1], packed[:, 2], sampling, self._tables(packed))

    def sampling_rows(self, packed):
        """Of the sampling table, packed."""
        return packed[:, 3 : self._ends[0]]

    def _tables(self, packed) -> tuple:
        parts = [packed[:, start:stop] for start, stop in itertools.pairwise(self._ends)]
        return tuple(part.reshape(-1, *shape) for part, shape in zip(parts, self.tables, strict=True))

    def pack(self, admitted: abc.Sequence[tuple[Sequence, int]]) -> np.ndarray:
        """The packed rows of sequences, each with the number of its tokens that the pool holds already."""
        packed = np.zeros((self.rows, self.size), np.int32)
        packed[:, 0] = self.max_num_seqs
        if admitted:
            rows, sequences = packed[: len(admitted)], [sequence for sequence, _ in admitted]
            rows[:, :3] = [(sequence.slot, length, _last_token(sequence)) for sequence, length in admitted]
            _pack_params(self.sampling_rows(rows), sequences)
            for index, table in enumerate(self._tables(rows)):
                _pack_tables(table, [sequence.table for sequence in sequences], index)
        return packed


def _last_token(sequence: Sequence) -> int:
    return (sequence.output_token_ids or sequence.prompt_token_ids)[-1]


def _pack_params(rows: np.ndarray, sequences: abc.Sequence[Sequence]) -> None:
    """Fills `rows` with what `SAMPLING_LAYOUT.pack` makes of each sequence: once for samples that come together, as
    they differ in nothing but their number."""
    start = 0
    for stop in range(1, len(sequences) + 1):
        first = sequences[start]
        if stop == len(sequences) or not _are_alike(sequences[stop], first):
            rows[start:stop] = _params_of(first)
            start = stop
    rows[:, SAMPLING_LAYOUT.offset("sample_index")] = [sequence.sample_index for sequence in sequences]


def _are_alike(sequence: Sequence, other: Sequence) -> bool:
    is_sibling = sequence.group is other.group and sequence.params is other.params
    return is_sibling and sequence.seed == other.seed


def _params_of(sequence: Sequence) -> np.ndarray:
    """The packed parameters of a sequence, or of one that is alike."""
    sibling = sequence.group.sequences[0]
    owner = sibling if _are_alike(sibling, sequence) else sequence
    if owner.packed_params is None:
        owner.packed_params = SAMPLING_LAYOUT.pack(owner)
    return owner.packed_params


def _pack_tables(rows: np.ndarray, tables: abc.Sequence[BlockTable], index: int) -> None:
    """Fills `rows`, `[rows, pages of a block, width]`, with the blocks of each table in the group `index`."""
    each = [table.groups[index] for table in tables]
    lengths, width = [len(of_group.ids) for of_group in each], rows.shape[2]
    longest = max(lengths)
    if longest > width:
        raise ValueError(f"{longest} blocks do not fit a block table of {width}")
    if rows.shape[1] == 1 and not any(of_group.start for of_group in each):
        is_block = np.arange(longest) < np.array(lengths)[:, None]
        ids = itertools.chain.from_iterable(of_group.ids for of_group in each)
        rows[:, 0, :longest][is_block] = np.fromiter(ids, np.int32, sum(lengths))
        return
    for row, table, of_group in zip(rows, tables, each, strict=True):
        if of_group.ids:
            pages = np.array(table.pages_of(of_group), np.int32).T
            row[:, np.arange(of_group.start, len(table)) % width] = pages
