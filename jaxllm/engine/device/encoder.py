"""From plans to commands. Of the device's side it alone reads sequences; what it makes are host arrays."""

import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from jaxllm.engine.config import EngineConfig
from jaxllm.engine.device.block_moves import SWAP_SIZES, encode_measurement, encode_moves
from jaxllm.engine.device.commands import Command
from jaxllm.engine.device.packing import (
    ADMIT_SIZES,
    PoolLayout,
    SampleLayout,
    StepLayout,
    pick_bucket,
    pool_ladder,
    sample_ladder,
    token_ladder,
)
from jaxllm.engine.device.slot_rows import AdmitLayout, table_shapes
from jaxllm.engine.device.state import rules_layout
from jaxllm.engine.schedule import sequence as schedule
from jaxllm.engine.schedule.plan import Chunk, Plan, StepPlan
from jaxllm.grammar.matcher import mask_words


class PromptLogprobSpan(NamedTuple):
    """Known tokens of a sequence whose log-probabilities are wanted: of its prompt, or targets."""

    sequence: schedule.Sequence
    epoch: int  # of the sequence
    start: int  # the first, among those of the sequence that are wanted
    token_ids: list[int]
    at: int  # among the step's tokens, of the one before the first


class Buckets(NamedTuple):
    """Sizes that steps may be padded to, ascending."""

    tokens: tuple[int, ...]
    samples: tuple[int, ...]


class Encoder:
    """Encodes plans for executables of these sizes. `ready` tells whether one is compiled, by its name."""

    def __init__(self, config: EngineConfig, vocab: int, ready: Callable[[Hashable], bool]):
        self.config, self._ready = config, ready
        self.all = Buckets(
            token_ladder(config.max_num_batched_tokens, config.min_bucket, free_padding=config.free_padding),
            sample_ladder(config.max_num_seqs, config.min_bucket),
        )
        sizes = config.max_num_seqs, config.block_size, config.pages_per_block
        self._steps = {n: StepLayout(n, *sizes) for n in self.all.tokens}
        self._shared_step = StepLayout(self.all.tokens[-1], *sizes, sharers=config.num_shards)
        self._pools = {n: PoolLayout(n, config.max_num_seqs) for n in pool_ladder(config.max_num_batched_tokens)}
        self._samples = {n: SampleLayout(n, config.max_num_seqs) for n in self.all.samples}
        tables = tuple(table.shape for table in table_shapes(config))
        self._admits = {n: AdmitLayout(n, config.max_num_seqs, tables) for n in ADMIT_SIZES}
        self._rules, self._mask_words = rules_layout(vocab), mask_words(vocab)

    def names(self, tokens: int, *, full: bool) -> list[Hashable]:
        """The executables of a step of this bucket, whatever it samples."""
        if not self.config.generates:
            return [("step", tokens), self._pool_name(tokens)]
        samples = pick_bucket(self.all.samples, self._most_samples(tokens))
        return [("step", tokens), *self.sampler_names(samples, full=full)]

    def _pool_name(self, tokens: int) -> tuple[str, int]:
        """What pools of a step of so many tokens."""
        return "pool", pick_bucket(tuple(self._pools), tokens)

    def _most_samples(self, tokens: int) -> int:
        return min(tokens, self.config.max_num_seqs)

    def sampler_names(self, samples: int, *, full: bool) -> list[Hashable]:
        """The executables that sample in a bucket. Some steps have nobody who needs the full sampler, even if some
        request does."""
        names: list[Hashable] = [("sample", samples)]
        return names + ["rules", ("logits", samples), ("alter", samples), ("sample_full", samples)] * full

    def usable(self, *, full: bool) -> Buckets:
        """The buckets that have all their executables, those of the full sampler among them if a request needs it."""
        if not self.config.generates:
            tokens = [n for n in self.all.tokens if self._are_ready(self.names(n, full=False))]
            return Buckets(tuple(tokens), self.all.samples)
        samples = [n for n in self.all.samples if self._are_ready(self.sampler_names(n, full=full))]
        tokens = [
            n for n in self.all.tokens if self._ready(("step", n)) and self._most_samples(n) <= max(samples, default=0)
        ]
        return Buckets(tuple(tokens), tuple(samples))

    def _are_ready(self, names: Sequence[Hashable]) -> bool:
        return all(map(self._ready, names))

    def may_share(self) -> bool:
        """Whether what computes a prompt in several shards is compiled."""
        return self.config.shares_prompts and self._ready(("step_shared", self._shared_step.tokens))

    def empty_masks(self, plan: StepPlan, buckets: Buckets) -> np.ndarray:
        """A fresh int32 [samples, words] for the masks of the step's samples, one shard after the other, one bit a
        token; they allow everything so far."""
        samples = pick_bucket(buckets.samples, plan.most_samples)
        return np.full((len(plan.shards) * samples, self._mask_words), -1, np.int32)

    def encode_measurement(self) -> Command | None:
        """What measures the bandwidth to host memory and back; None until what it runs is compiled."""
        if not self._are_ready([(name, SWAP_SIZES[-1]) for name in ("swap_out", "swap_in")]):
            return None
        return encode_measurement(self.config.num_pages, self.config.num_shards)

    def encode_forward(self, plan: StepPlan, buckets: Buckets) -> list[Command]:
        """All but the sampling, in the smallest of the `buckets` that holds it. Decode rows take their tokens from the
        slots, into which the sampling of the step before puts them."""
        config = self.config
        commands = encode_moves(plan, config.num_pages, config.max_num_seqs) + self._admit(plan)
        if plan.shared is not None:
            name = "step_shared", self._shared_step.tokens
            commands.append(Command(name, (_of_shards(map(self._shared_step.pack, plan.shards)),)))
        elif plan.num_tokens:
            tokens = pick_bucket(buckets.tokens, plan.most_tokens)
            commands.append(Command(("step", tokens), (_of_shards(map(self._steps[tokens].pack, plan.shards)),)))
        return commands

    def encode_sample(self, plan: StepPlan, buckets: Buckets, masks: np.ndarray | None = None) -> list[Command]:
        """The sampling. `masks` are of `empty_masks`, if some samples follow a grammar, and are not written any more.

        Of its results, the last one or two are the samples': `[samples]` tokens; or `[samples, width]`, with their
        log-probabilities, and the beams' candidates. Before them come those of `spans`, in their order; and first, if
        the plan has pooled rows, their `[rows, outputs]`. Each has the shards' one after the other.
        """
        commands = self._prompt_logprobs([spans_of(each) for each in plan.shards])
        if plan.pooled:
            name = self._pool_name(plan.most_tokens)
            packed = _of_shards(self._pools[name[1]].pack(each.pooled) for each in plan.shards)
            commands.insert(0, Command(name, (packed,)))
        if not plan.num_samples:
            return commands
        samples = pick_bucket(buckets.samples, plan.most_samples)
        alters = masks is not None or plan.alters_logits
        packed = _of_shards(self._samples[samples].pack(each, is_altered=alters) for each in plan.shards)
        if not plan.full_sampler:
            return [*commands, Command(("sample", samples), (packed,))]
        commands.append(Command(("logits", samples), (packed,)))
        if alters:
            masks = self.empty_masks(plan, buckets) if masks is None else masks
            commands.append(Command(("alter", samples), (masks, packed)))
        return [*commands, Command(("sample_full", samples), (packed,))]

    def _prompt_logprobs(self, spans: Sequence[Sequence[PromptLogprobSpan]]) -> list[Command]:
        """From the hidden states of the step just dispatched, `max_num_seqs` tokens of each shard at a time."""
        size = self.config.max_num_seqs
        columns = [[of_span for span in of_shard for of_span in _tokens_of(span)] for of_shard in spans]
        commands = []
        for i in range(0, max(map(len, columns)), size):
            packed = np.zeros((len(columns), 2, size), np.int32)
            for row, of_shard in zip(packed, columns, strict=True):
                part = np.asarray(of_shard[i : i + size], np.int32).reshape(-1, 2)
                row[:, : len(part)] = part.T
                row[0, len(part) :] = -1
            commands.append(Command("prompt_logprobs", (packed.reshape(-1, size),)))
        return commands

    def _admit(self, plan: StepPlan) -> list[Command]:
        most = max(len(each.admitted) for each in plan.shards)
        size = ADMIT_SIZES[-1] if most > 1 and self._ready(("admit", ADMIT_SIZES[-1])) else ADMIT_SIZES[0]
        commands = []
        for at in range(0, most, size):
            packed = _of_shards(self._admits[size].pack(each.admitted[at : at + size]) for each in plan.shards)
            commands.append(Command(("admit", size), (packed,)))
        for row in itertools.zip_longest(*(each.rules for each in plan.shards)):
            commands.append(Command("rules", (_of_shards(map(self._pack_rules, row)),)))
        return commands

    def _pack_rules(self, sequence: schedule.Sequence | None) -> np.ndarray:
        """int32 [1, size]: a slot and its row, or padding."""
        packed = np.zeros((1, 1 + self._rules.size), np.int32)
        if sequence is None:
            packed[0, 0] = self.config.max_num_seqs
        else:
            packed[0, 0], packed[0, 1:] = sequence.slot, self._rules.pack(sequence)
        return packed


def _of_shards(packed: Iterable[np.ndarray]) -> np.ndarray:
    """One after the other."""
    each = list(packed)
    return each[0] if len(each) == 1 else np.concatenate(each)


def _tokens_of(span: PromptLogprobSpan) -> Iterable[tuple[int, int]]:
    """Of each of the span's tokens the one before, among the step's, and its id."""
    return zip(itertools.count(span.at), span.token_ids, strict=False)


def spans_of(plan: Plan) -> list[PromptLogprobSpan]:
    """The known tokens that the step's hidden states predict, of sequences that want to know and don't yet."""
    spans, at = [], len(plan.decodes)
    for chunk in plan.chunks:
        sequence = chunk.sequence
        if sequence.targets is not None:
            first = len(sequence.prompt_token_ids) - 1
            spans += _span(chunk, at, sequence.targets.token_ids, first, sequence.targets.num_known)
        elif sequence.wants_prompt_logprobs:
            spans += _span(chunk, at, sequence.prompt_token_ids, -1, 1 + len(sequence.prompt_logprobs))
        at += chunk.num_tokens
    return spans


def _span(chunk: Chunk, at: int, wanted: list[int], first: int, num_known: int) -> list[PromptLogprobSpan]:
    """What a chunk whose first token is the step's token `at` says of the `wanted` tokens, of which `num_known` are
    known, and the first comes after the sequence's token `first`. Nothing, or one."""
    start, stop = max(chunk.start - first, num_known), min(chunk.stop - first, len(wanted))
    if start >= stop:
        return []
    sequence, ids = chunk.sequence, wanted[start:stop]
    return [PromptLogprobSpan(sequence, sequence.epoch, start, ids, at + first + start - chunk.start)]
