"""A device made of numpy arrays, whose blocks show which tokens were written to them: a shadow of the real one."""

import math
import zlib
from collections import abc
from dataclasses import dataclass

import numpy as np

from jaxllm.engine.beam.candidates import BeamRow
from jaxllm.engine.beam.search import Candidates
from jaxllm.engine.schedule.cache_groups import EVERYTHING
from jaxllm.engine.schedule.plan import NOT_ACCEPTED, Chunk, Plan
from jaxllm.engine.schedule.sequence import Sequence

EOS = 0
PROMPT_TOKENS = (1, 2)  # few, so that prefixes collide
VOCAB = (EOS, *PROMPT_TOKENS, 3)


def sampled(request: Sequence, position: int) -> int:
    """The token that the model gives at `position`: a function of the request alone, like a seeded draw."""
    draw = zlib.crc32(b"%d,%d,%d" % (request.seed, request.sample_index, position)) % 10
    masked = position < len(request.prompt_token_ids) + request.params.min_tokens
    return EOS if draw == 0 and not masked else PROMPT_TOKENS[draw % 2]


def candidates(request: Sequence, tokens: list[int]) -> Candidates:
    """What a beam with these tokens, the prompt's among them, may go on with."""
    weights = [zlib.crc32(b"%d,%d," % (request.seed, token) + bytes(tokens)) % 97 + 1 for token in VOCAB]
    if len(tokens) < len(request.prompt_token_ids) + request.params.min_tokens:
        weights[EOS] = 0
    order = sorted((token for token in VOCAB if weights[token]), key=lambda token: -weights[token])
    scores = np.array([math.log(weights[token] / sum(weights)) for token in order], np.float32)
    return Candidates(np.array(order, np.int32), scores, scores, np.arange(1, len(order) + 1, dtype=np.int32))


def digests(tokens: list[int]) -> list[int]:
    """Of each prefix: what the cell of its last token holds, as keys and values depend on all tokens before."""
    found = [0]
    for token in tokens:
        found.append(zlib.crc32(b"%d" % token, found[-1]) + 1)
    return found[1:]


def _tables(request: Sequence) -> list[dict[int, tuple[int, ...]]]:
    table = request.table
    return [dict(enumerate(table.pages_of(each), start=each.start)) for each in table.groups]


@dataclass
class Slot:
    request: Sequence
    tables: list[dict[int, tuple[int, ...]]]  # of each group: a block's pages by its index
    length: int  # tokens in the pool
    last_token: int


class Device:
    """Runs plans at once, writes before reads as the kernel does. A cell holds a digest of the tokens up to its own,
    computed from the cell before it, and the version of the parameters. Of a state, a block has one cell."""

    def __init__(self, num_blocks: int, block_size: int, groups=EVERYTHING, version: int = 0):
        self.block_size, self.groups, self.version = block_size, groups, version
        num_pages = num_blocks * sum(group.num_pages for group in groups)
        self.cells = np.full((num_pages, block_size, 2), -1, np.int64)
        self.accepts: abc.Sequence[int] = (3,)  # tokens of each row with drafts, at most and in turn
        self.num_verified = 0  # rows with drafts
        self.slots: dict[int, Slot] = {}
        self.host: dict[int, np.ndarray] = {}

    def read(self, slot: Slot, group: int, start: int) -> np.ndarray:
        """What all pages of a group say of the tokens from `start` on, `[pages, tokens, 2]`."""
        table = slot.tables[group]
        places = [divmod(position, self.block_size) for position in range(start, slot.length)]
        if self.groups[group].is_state:
            places = [(index, 0) for index, _ in places[-1:]]
        pages = np.array([table[index] for index, _ in places], int).reshape(len(places), self.groups[group].num_pages)
        return self.cells[pages.T, [cell for _, cell in places]]

    def holds(self, slot: Slot, tokens: list[int], position: int | None = None) -> bool:
        """Whether all is there that a token at `position`, the next unless given, and those after it read."""
        position, wanted = slot.length if position is None else position, digests(tokens[: slot.length])
        for group, (window, _, is_state) in enumerate(self.groups):
            start = 0 if window is None else max(0, position - window + 1)
            known = wanted[start:] if not is_state else wanted[start:][-1:]
            if not (self.read(slot, group, start)[..., 0] == known).all():
                return False
        return True

    def run(self, plan: Plan, fresh: list[Sequence]) -> tuple[list[int], list[BeamRow | None]]:
        """Returns the token of each sample, and the candidates of beams. `fresh` are requests that have nothing but
        what they find in the prefix cache."""
        self._move(plan)
        forked = {request for _, request in plan.forks}
        for request, length in plan.admitted:
            known = request.prompt_token_ids + request.output_token_ids
            slot = self.slots[request.slot] = Slot(request, _tables(request), length, known[-1])
            assert request in forked or self.holds(slot, known), "what it starts with is there before the step"
            if request in fresh:
                starts = [0 if g.window is None else max(0, length - g.window + 1) for g in self.groups]
                found = [self.read(slot, group, start)[..., 1] for group, start in enumerate(starts)]
                assert all((at == self.version).all() for at in found), "a prefix hit is of these parameters"
        for slot, index, *pages in plan.new_blocks:
            for table, group in zip(self.slots[slot].tables, self.groups, strict=True):
                table[index], pages = tuple(pages[: group.num_pages]), pages[group.num_pages :]
        before = {request: self.slots[request.slot].length for request in plan.rows}
        self._write(plan)
        verified = {chunk.sequence: self._verify(chunk) for chunk in plan.chunks if chunk.drafts}
        for request in plan.rows:
            slot = self.slots[request.slot]
            assert self.holds(slot, request.prompt_token_ids + self._output(request), before[request])
        return self._sample(plan, verified)

    def _move(self, plan: Plan) -> None:
        for key, pages in plan.swap_outs:
            assert key not in self.host
            self.host[key] = self.cells[pages]
        returned = [page for swap in plan.swap_ins for page in swap.pages]
        for key, pages in plan.swap_ins:
            for page, contents in zip(pages, self.host.pop(key), strict=True):
                if page < len(self.cells):
                    self.cells[page] = contents
        sources, targets = [copy.source for copy in plan.copies], [copy.target for copy in plan.copies]
        assert not set(sources) & set(returned) and len(set(targets)) == len(targets)
        self.cells[targets] = self.cells[sources]
        for key in plan.released_copies:
            del self.host[key]

    def _write(self, plan: Plan) -> None:
        written = set()
        given = [(request, None) for request in plan.decodes] + [(chunk.sequence, chunk) for chunk in plan.chunks]
        for request, chunk in given:
            slot = self.slots[request.slot]
            assert slot.request is request
            for table, wanted in zip(slot.tables, _tables(request), strict=True):
                assert table | wanted == table
            assert chunk is None or slot.length == chunk.start
            if chunk is not None:
                tokens = [*request.token_ids(chunk.start, chunk.stop), *chunk.drafts]
            elif request.is_beam and request.output_token_ids:
                tokens = request.output_token_ids[-1:]
            else:
                tokens = [slot.last_token]
            for token in tokens:
                for group, table in enumerate(slot.tables):
                    index, cell = divmod(slot.length, self.block_size)
                    is_state, before = self.groups[group].is_state, [0] * len(table[index])
                    if slot.length:
                        before = self.read(slot, group, slot.length - 1)[:, 0, 0]
                    for page, digest in zip(table[index], before, strict=True):
                        place = page, cell
                        assert place not in written
                        written.add(place)
                        contents = zlib.crc32(b"%d" % token, int(digest)) + 1, self.version
                        self.cells[page, 0 if is_state else cell] = contents
                slot.length += 1

    def _output(self, request: Sequence) -> list[int]:
        """All tokens that the request can have by now, those that the host does not know yet included."""
        if request.is_beam:
            return request.output_token_ids
        first = len(request.prompt_token_ids)
        return [sampled(request, position) for position in range(first, request.num_tokens + request.num_in_flight)]

    def _verify(self, chunk: Chunk) -> list[int]:
        """Draws a token after the last known one and after each draft. Accepts those that come after right drafts
        alone, or fewer: the slot's length grows by as many."""
        slot, num_drafts = self.slots[chunk.sequence.slot], len(chunk.drafts)
        drawn = [sampled(chunk.sequence, position) for position in range(chunk.stop, chunk.stop + num_drafts + 1)]
        num_right = next((i for i, draft in enumerate(chunk.drafts) if draft != drawn[i]), num_drafts)
        num_accepted = min(1 + num_right, self.accepts[self.num_verified % len(self.accepts)])
        self.num_verified += 1
        slot.length += num_accepted - (1 + num_drafts)
        if num_accepted:
            slot.last_token = drawn[num_accepted - 1]
        return drawn[:num_accepted] + [NOT_ACCEPTED] * (1 + num_drafts - num_accepted)

    def _sample(self, plan: Plan, verified: dict[Sequence, list[int]]) -> tuple[list[int], list[BeamRow | None]]:
        tokens, rows = [], []
        ends = np.cumsum([1] * len(plan.decodes) + [chunk.num_tokens for chunk in plan.chunks]).tolist()
        for request, token in zip(plan.samples, plan.sample_tokens, strict=True):
            slot, known = self.slots[request.slot], request.prompt_token_ids + self._output(request)
            assert slot.request is request and self.holds(slot, known)
            if request in verified:
                drawn = verified[request]
                assert token == ends[plan.rows.index(request)] - len(drawn), "a sample for each of its tokens"
                tokens.append(drawn.pop(0))
                rows.append(None)
                continue
            other = self.slots[plan.rows[ends.index(token + 1)].slot]
            assert other.length == slot.length and self.holds(other, known), "the logits are of other tokens"
            slot.last_token = sampled(request, slot.length)
            tokens.append(slot.last_token)
            rows.append(BeamRow(candidates(request, known), None) if request.is_beam else None)
        return tokens, rows
