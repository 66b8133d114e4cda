"""A device made of numpy arrays, whose blocks show which tokens were written to them: a shadow of the real one."""

import math
import zlib
from collections import abc
from dataclasses import dataclass

import numpy as np

from jaxllm.engine.beam.candidates import BeamRow
from jaxllm.engine.beam.search import Candidates
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


@dataclass
class Slot:
    request: Sequence
    block_table: list[int]
    length: int  # tokens in the pool
    last_token: int


class Device:
    """Runs plans at once, writes before reads as the kernel does. A cell holds a digest of the tokens up to its own,
    computed from the cell before it, and the version of the parameters."""

    def __init__(self, num_blocks: int, block_size: int, version: int = 0):
        self.block_size, self.version = block_size, version
        self.cells = np.full((num_blocks, block_size, 2), -1, np.int64)
        self.accepts: abc.Sequence[int] = (3,)  # tokens of each row with drafts, at most and in turn
        self.num_verified = 0  # rows with drafts
        self.slots: dict[int, Slot] = {}
        self.host: dict[int, np.ndarray] = {}

    def read(self, slot: Slot) -> np.ndarray:
        """[tokens, 2]"""
        return self.cells[slot.block_table].reshape(-1, 2)[: slot.length]

    def holds(self, slot: Slot, tokens: list[int]) -> bool:
        return self.read(slot)[:, 0].tolist() == digests(tokens[: slot.length])

    def run(self, plan: Plan, fresh: list[Sequence]) -> tuple[list[int], list[BeamRow | None]]:
        """Returns the token of each sample, and the candidates of beams. `fresh` are requests that have nothing but
        what they find in the prefix cache."""
        self._move(plan)
        forked = {request for _, request in plan.forks}
        for request, length in plan.admitted:
            known = request.prompt_token_ids + request.output_token_ids
            slot = self.slots[request.slot] = Slot(request, list(request.table.ids), length, known[-1])
            assert request in forked or self.holds(slot, known), "what it starts with is there before the step"
            if request in fresh:
                assert (self.read(slot)[:, 1] == self.version).all(), "a prefix hit is of these parameters"
        for slot, index, block in plan.new_blocks:
            self.slots[slot].block_table[index : index + 1] = [block]
        self._write(plan)
        verified = {chunk.sequence: self._verify(chunk) for chunk in plan.chunks if chunk.drafts}
        for request in plan.rows:
            assert self.holds(self.slots[request.slot], request.prompt_token_ids + self._output(request))
        return self._sample(plan, verified)

    def _move(self, plan: Plan) -> None:
        for key, blocks in plan.swap_outs:
            assert key not in self.host
            self.host[key] = self.cells[blocks]
        returned = [block for swap in plan.swap_ins for block in swap.blocks]
        for key, blocks in plan.swap_ins:
            for block, contents in zip(blocks, self.host.pop(key), strict=True):
                if block < len(self.cells):
                    self.cells[block] = contents
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
            block_table = slot.block_table[: len(request.table)]  # behind it are blocks that only drafts had
            assert slot.request is request and block_table == request.table.ids
            assert chunk is None or slot.length == chunk.start
            if chunk is not None:
                tokens = [*request.token_ids(chunk.start, chunk.stop), *chunk.drafts]
            elif request.is_beam and request.output_token_ids:
                tokens = request.output_token_ids[-1:]
            else:
                tokens = [slot.last_token]
            for token in tokens:
                before = self.read(slot)[-1, 0] if slot.length else 0
                index, cell = divmod(slot.length, self.block_size)
                place = slot.block_table[index], cell
                assert place not in written
                written.add(place)
                self.cells[place] = zlib.crc32(b"%d" % token, int(before)) + 1, self.version
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
