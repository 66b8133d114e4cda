"""An executor made of numpy arrays, whose blocks show which tokens were written to them: a shadow of the real one."""

import math
import zlib
from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.fake_executor import FakeExecutor
from jaxllm.engine.beam.candidates import CANDIDATES_WIDTH, NUM_CANDIDATES
from jaxllm.engine.beam.search import Candidates
from jaxllm.engine.config import EngineConfig
from jaxllm.engine.device.commands import Command
from jaxllm.engine.device.packing import FROM_SLOT, PoolLayout, SampleInput, StepInput, StepLayout
from jaxllm.engine.device.slot_rows import AdmitLayout, table_shapes
from jaxllm.engine.device.state import SamplingTable
from jaxllm.engine.logprobs import WIDTH_WITH_IDS
from jaxllm.engine.schedule.plan import NOT_ACCEPTED

EOS = 0
PROMPT_TOKENS = (1, 2)  # few, so that prefixes collide
VOCAB = (EOS, *PROMPT_TOKENS, 3)


def sampled(seed: int, sample_index: int, position: int, min_len: int) -> int:
    """The token that the model gives at `position`: a function of the sequence alone, like a seeded draw."""
    draw = zlib.crc32(b"%d,%d,%d" % (seed, sample_index, position)) % 10
    return EOS if draw == 0 and position >= min_len else PROMPT_TOKENS[draw % 2]


def candidates(seed: int, tokens: list[int], min_len: int) -> Candidates:
    """What a beam with these tokens, the prompt's among them, may go on with."""
    weights = [zlib.crc32(b"%d,%d," % (seed, token) + bytes(tokens)) % 97 + 1 for token in VOCAB]
    if len(tokens) < min_len:
        weights[EOS] = 0
    order = sorted((token for token in VOCAB if weights[token]), key=lambda token: -weights[token])
    scores = np.array([math.log(weights[token] / sum(weights)) for token in order], np.float32)
    return Candidates(np.array(order, np.int32), scores, scores, np.arange(1, len(order) + 1, dtype=np.int32))


def packed_candidates(found: Candidates) -> np.ndarray:
    """As a step's result has them."""
    columns = []
    for values, padding in zip(found, (0, -np.inf, 0.0, 0), strict=True):
        columns.append(np.pad(values, (0, NUM_CANDIDATES - len(values)), constant_values=padding).view(np.int32))
    return np.concatenate(columns)


def digests(tokens: list[int]) -> list[int]:
    """Of each prefix: what the cell of its last token holds, as keys and values depend on all tokens before."""
    found = [0]
    for token in tokens:
        found.append(zlib.crc32(b"%d" % token, found[-1]) + 1)
    return found[1:]


def hidden_state(tokens: list[int]) -> np.ndarray:
    """The model's after these tokens."""
    return np.array([len(tokens), tokens[-1], digests(tokens)[-1] % 97], np.float64)


class ShadowExecutor(FakeExecutor):
    """Applies commands at once, writes before reads as the kernel does. A cell holds a digest of the tokens up to its
    own, computed from the cell before it, and the version of the parameters. `on_admit` is told which slots have new
    rows, and says in `tokens` what they hold."""

    def __init__(self, config: EngineConfig, *, page_bytes: int):
        super().__init__(config, self._draw, page_bytes=page_bytes)
        self.version = 0
        self.accepts: Sequence[int] = (3,)  # tokens of each row with drafts, at most and in turn
        self.num_verified = 0  # rows with drafts
        self.on_admit: Callable[[Sequence[int]], None] = lambda slots: None
        self.host: dict[int, list[np.ndarray]] = {}

    def apply_one(self, command: Command) -> Sequence[np.ndarray]:
        return getattr(self, f"_{command.kind}")(command) or ()

    def pages(self, slot: int, group: int, index: int) -> list[int]:
        """Of a block of the slot."""
        return self.tables[group][slot, :, index % self.shapes[group].width].tolist()

    def read(self, slot: int, group: int, start: int) -> np.ndarray:
        """What all pages of a group say of the tokens from `start` on, `[pages, tokens, 2]`. Of a state, that is what
        the last of them has left."""
        places = [divmod(position, self.config.block_size) for position in range(start, self.lengths[slot])]
        if self.shapes[group].group.is_state:
            places = [(index, 0) for index, _ in places[-1:]]
        pages = np.array([self.pages(slot, group, index) for index, _ in places], int)
        return self.cells[
            pages.reshape(len(places), self.shapes[group].group.num_pages).T, [cell for _, cell in places]
        ]

    def holds(self, slot: int, tokens: list[int], position: int | None = None) -> bool:
        """Whether all is there that these tokens give and that one at `position`, the next unless given, and those
        after it read."""
        position = int(self.lengths[slot]) if position is None else position
        wanted = digests(tokens[: self.lengths[slot]])
        for number, (group, _, _) in enumerate(self.shapes):
            start = 0 if group.window is None else max(0, position - group.window + 1)
            known = wanted[start:][-1:] if group.is_state else wanted[start:]
            if not (self.read(slot, number, start)[..., 0] == known).all():
                return False
        return True

    def _init(self, command: Command) -> None:
        config = self.config
        self.shapes = table_shapes(config)
        self.cells = np.full((config.num_pages, config.block_size, 2), -1, np.int64)
        self.tables = [np.zeros((config.max_num_seqs, *table.shape), np.int32) for table in self.shapes]
        self.tokens: dict[int, list[int]] = {}  # of each slot, as it has them in its blocks
        self.lengths, self.last_tokens = np.zeros((2, config.max_num_seqs), np.int32)
        self.sampling: dict[int, SamplingTable] = {}
        self.sums = np.full((config.max_num_seqs, 3), np.nan)
        self.host.clear()
        self.logits_of: list[tuple[int, int]] = []  # slot and length of each of the last step's tokens

    def _update_params(self, command: Command) -> None:
        self.version = command.key

    def _measure_bandwidth(self, command: Command) -> list[np.ndarray]:
        return [np.array([1e9])]

    def _settle(self, command: Command) -> None:
        """Everything is where it should be."""

    def _rules(self, command: Command) -> None:
        """Nobody has any."""

    def _swap_out(self, command: Command) -> None:
        assert command.key not in self.host
        self.host[command.key] = [self.cells[np.minimum(ids, len(self.cells) - 1)] for ids in command.arrays]

    def _swap_in(self, command: Command) -> None:
        for ids, contents in zip(command.arrays, self.host.pop(command.key), strict=True):
            is_page = ids < len(self.cells)
            self.cells[ids[is_page]] = contents[is_page]

    def _copy(self, command: Command) -> None:
        (packed,) = command.arrays
        sources, targets = packed[:, packed[1] < len(self.cells)]
        assert len({*targets.tolist()}) == len(targets)
        self.cells[targets] = self.cells[sources]

    def _release(self, command: Command) -> None:
        del self.host[command.key]

    def _admit(self, command: Command) -> None:
        _, rows = command.name
        layout = AdmitLayout(rows, self.config.max_num_seqs, tuple(table.shape for table in self.shapes))
        row = layout.unpack(command.arrays[0])
        slots = [int(slot) for slot in row.slot if slot < self.config.max_num_seqs]
        for i, slot in enumerate(slots):
            for table, given in zip(self.tables, row.block_tables, strict=True):
                table[slot] = given[i]
            self.lengths[slot] = row.length[i]
            self.last_tokens[slot] = row.last_token[i]
            self.sampling[slot] = SamplingTable(*(column[i] for column in row.sampling))
        self.on_admit(slots)

    def _step(self, command: Command) -> list[np.ndarray]:
        _, tokens = command.name
        config = self.config
        layout = StepLayout(tokens, config.max_num_seqs, config.block_size, config.pages_per_block)
        given = layout.unpack(command.arrays[0])
        self.run(given)
        return [given.counts]

    def run(self, given: StepInput, shared_slot: int = -1) -> list[int]:
        """Writes the tokens of all rows but that of `shared_slot`, which are returned."""
        config, shared = self.config, []
        for slot, index, *pages in given.new_blocks.T:
            for table, (group, width, _) in zip(self.tables, self.shapes, strict=True):
                if slot < config.max_num_seqs:
                    table[slot, :, index % width] = pages[: group.num_pages]
                pages = pages[group.num_pages :]
        at, written = 0, set()
        self.logits_of = []
        for slot, q_len in zip(given.slots[: given.counts[1]], given.q_lens, strict=False):
            for token in given.tokens[at : at + q_len]:
                if slot == shared_slot:
                    shared.append(int(token))
                else:
                    self.write(int(slot), int(self.last_tokens[slot] if token == FROM_SLOT else token), written)
            at += q_len
        assert at == given.counts[2]
        return shared

    def write(self, slot: int, token: int, written: set[tuple[int, int]]) -> None:
        """A token of a slot, after those that it has. No cell is `written` twice in a step."""
        length = int(self.lengths[slot])
        index, cell = divmod(length, self.config.block_size)
        for number, (group, _, _) in enumerate(self.shapes):
            pages = self.pages(slot, number, index)
            before = self.read(slot, number, length - 1)[:, 0, 0] if length else [0] * len(pages)
            for page, digest in zip(pages, before, strict=True):
                assert (page, cell) not in written
                written.add((page, cell))
                contents = zlib.crc32(b"%d" % token, int(digest)) + 1, self.version
                self.cells[page, 0 if group.is_state else cell] = contents
        self.lengths[slot] += 1
        self.tokens[slot] = [*self.tokens[slot][:length], token]
        self.logits_of.append((slot, length + 1))

    def _pool(self, command: Command) -> list[np.ndarray]:
        """A hidden state is what `hidden_state` says, once the cells say that its tokens are there."""
        layout = PoolLayout(command.name[1], self.config.max_num_seqs)
        given = layout.unpack(command.arrays[0])
        pooled = np.full((layout.rows, 3), np.nan, np.float32)
        for i, slot in enumerate(int(slot) for slot in given.slots):
            if slot == self.config.max_num_seqs:
                continue
            total = np.zeros(3) if given.begins[i] else self.sums[slot]
            for at in range(given.starts[i], given.stops[i]):
                owner, length = self.logits_of[at]
                assert owner == slot, "the hidden state is another slot's"
                cell = self.read(slot, 0, length - 1)[0, 0, 0]
                assert cell == digests(self.tokens[slot][:length])[-1], "it is of other tokens"
                total = total + hidden_state(self.tokens[slot][:length])
            self.sums[slot] = total
            pooled[i] = total * given.shares[i : i + 1].view(np.float32)[0]
        return [pooled]

    def _sample(self, command: Command) -> list[np.ndarray]:
        return [self._draw(self.samples_of(command))]

    def _logits(self, command: Command) -> None:
        """As they are."""

    def _alter(self, command: Command) -> None:
        """Nobody asks for it."""

    def _sample_full(self, command: Command) -> list[np.ndarray]:
        """The log-probabilities say of which sequence and position each token is."""
        given = self.samples_of(command)
        rows = np.zeros((len(given.slots), 1 + WIDTH_WITH_IDS), np.int32)
        found = np.zeros((len(given.slots), CANDIDATES_WIDTH), np.int32)
        for i, (token, slot) in enumerate(zip(given.tokens, given.slots.tolist(), strict=True)):
            if slot < self.config.max_num_seqs:
                row = self.sampling[slot]
                rows[i, 1:3] = np.float32(_seed(row)).view(np.int32), self.logits_of[token][1]
                if row.is_beam:
                    tokens = self.tokens[slot][: self.lengths[slot]]
                    found[i] = packed_candidates(candidates(_seed(row), tokens, int(row.min_len)))
        rows[:, 0] = self._draw(given)
        return [rows, found]

    def _draw(self, given: SampleInput) -> np.ndarray:
        drawn, i = np.zeros(len(given.slots), np.int32), 0
        while i < len(drawn):
            slot, end = given.slots[i], i + 1
            if slot < self.config.max_num_seqs:
                while end < len(drawn) and given.slots[end] == slot:
                    end += 1
                self._check_logits(slot, given.tokens[i])
                drawn[i:end] = self._draw_some(slot, end - i)
            i = end
        return drawn

    def _check_logits(self, slot: int, token: int) -> None:
        """The slot goes on from this token of the step, though it may be another slot's."""
        other, length = self.logits_of[token]
        assert self.lengths[other] == self.lengths[slot] >= length, "the logits are of another position"
        ours, theirs = (self.read(each, 0, length - 1)[0, 0, 0] for each in (slot, other))
        assert ours == theirs, "the logits are of other tokens"

    def _draw_some(self, slot: int, count: int) -> list[int]:
        """A token after the last known one, and after each of the drafts behind it. Accepts those that come after right
        drafts alone, or fewer: the slot's length grows by as many."""
        row, num_drafts = self.sampling[slot], count - 1
        first = int(self.lengths[slot]) - num_drafts
        drafts = self.tokens[slot][first : self.lengths[slot]]
        drawn = [
            sampled(_seed(row), int(row.sample_index), position, int(row.min_len))
            for position in range(first, first + count)
        ]
        num_accepted = 1
        if drafts:
            num_right = next((i for i, draft in enumerate(drafts) if draft != drawn[i]), num_drafts)
            num_accepted = min(1 + num_right, self.accepts[self.num_verified % len(self.accepts)])
            self.num_verified += 1
            self.lengths[slot] = first - 1 + num_accepted
        if num_accepted:
            self.last_tokens[slot] = drawn[num_accepted - 1]
        return drawn[:num_accepted] + [NOT_ACCEPTED] * (count - num_accepted)


def _seed(row: SamplingTable) -> int:
    high, low = row.seed.tolist()
    return high << 32 | low
