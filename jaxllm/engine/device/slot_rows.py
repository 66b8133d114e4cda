"""Rows of the slot table as they cross to the device: packed when a sequence is admitted."""

import itertools
from collections import abc
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from jaxllm.engine.config import EngineConfig
from jaxllm.engine.device.state import SAMPLING_LAYOUT, SamplingTable
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
        sampling = SAMPLING_LAYOUT.unpack(packed[:, 3 : self._ends[0]])
        return SlotRow(packed[:, 0], packed[:, 1], packed[:, 2], sampling, self._tables(packed))

    def _tables(self, packed) -> tuple:
        parts = [packed[:, start:stop] for start, stop in itertools.pairwise(self._ends)]
        return tuple(part.reshape(-1, *shape) for part, shape in zip(parts, self.tables, strict=True))

    def pack(self, admitted: abc.Sequence[tuple[Sequence, int]]) -> np.ndarray:
        """The packed rows of sequences, each with the number of its tokens that the pool holds already."""
        packed = np.zeros((self.rows, self.size), np.int32)
        packed[:, 0] = self.max_num_seqs
        tables = self._tables(packed)
        for i, (sequence, length) in enumerate(admitted):
            if sequence.packed_params is None:
                sequence.packed_params = _pack_params(sequence)
            last_token = (sequence.output_token_ids or sequence.prompt_token_ids)[-1]
            packed[i, :3] = sequence.slot, length, last_token
            packed[i, 3 : self._ends[0]] = sequence.packed_params
            for of_group, table in zip(sequence.table.groups, tables, strict=True):
                if len(of_group.ids) > table.shape[2]:
                    raise ValueError(f"{len(of_group.ids)} blocks do not fit a block table of {table.shape[2]}")
                if of_group.ids:
                    pages = np.array(sequence.table.pages_of(of_group), np.int32).T
                    if of_group.start:
                        table[i][:, np.arange(of_group.start, len(sequence.table)) % table.shape[2]] = pages
                    else:
                        table[i, :, : pages.shape[1]] = pages
        return packed


def _pack_params(sequence: Sequence) -> np.ndarray:
    """As `SAMPLING_LAYOUT.pack`, which is done once for samples that differ in nothing but their number."""
    sibling = sequence.group.sequences[0]
    if sibling.packed_params is None or sibling.params is not sequence.params or sibling.seed != sequence.seed:
        return SAMPLING_LAYOUT.pack(sequence)
    packed = sibling.packed_params.copy()
    packed[SAMPLING_LAYOUT.offset("sample_index")] = sequence.sample_index
    return packed
