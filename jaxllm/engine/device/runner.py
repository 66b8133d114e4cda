"""Owns the device: parameters, state and executables. Sees plans and arrays, never a queue."""

import logging
import time
import weakref
from collections.abc import Callable, Hashable
from functools import partial
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from jaxllm.engine.config import EngineConfig
from jaxllm.engine.device import memory
from jaxllm.engine.device.block_moves import BlockMoves, host_bytes
from jaxllm.engine.device.compile_plan import CompilePlan
from jaxllm.engine.device.executables import Lowering, ModelShape
from jaxllm.engine.device.packing import ADMIT_SIZES, AdmitLayout, PenaltyLayout, StepLayout, pick_bucket, token_ladder
from jaxllm.engine.device.state import DeviceState
from jaxllm.engine.schedule.plan import Plan
from jaxllm.engine.schedule.preemption_costs import PreemptionCosts
from jaxllm.engine.schedule.sequence import Sequence
from jaxllm.errors import EngineDeadError
from jaxllm.grammar.matcher import mask_words
from jaxllm.models.transformer import Params
from jaxllm.pallas_kernels.native import huge_pages

log = logging.getLogger(__name__)


class PromptLogprobSpan(NamedTuple):
    """Prompt tokens `start` to `stop` of a sequence, whose log-probabilities are wanted."""

    sequence: Sequence
    epoch: int  # of the sequence
    start: int
    stop: int
    at: int  # among the step's tokens, of the one before the first


class Forward(NamedTuple):
    """A step whose forward pass is dispatched, and whose samples are not yet."""

    plan: Plan
    dispatched_at: float  # seconds of time.perf_counter
    logits: Array | None  # float32 [seqs, vocab] that each sample comes from; None if the plan has no rows
    sample_slots: Array | None  # int32 [seqs]: the slots that they are for


class Handle(NamedTuple):
    """A dispatched step: its plan, and what the host will read of it, which is on its way there."""

    plan: Plan
    dispatched_at: float  # seconds of time.perf_counter
    result: Array | None  # int32 [seqs]: the sampled tokens; or [seqs, width]: with their log-probabilities
    candidates: Array | None  # int32 [seqs, width] if there are beams
    spans: list[PromptLogprobSpan]
    prompt_logprobs: list[Array]  # int32 [rows, width] of the spans' tokens, one span after the other


class Result(NamedTuple):
    """A step that is over."""

    tokens: list[int]  # of each sample, then padding
    logprobs: np.ndarray | None  # int32 [seqs, width] of the full sampler; see engine/logprobs.py
    candidates: np.ndarray | None  # int32 [seqs, width] if there are beams; see beam/candidates.py
    prompt_logprobs: list[tuple[PromptLogprobSpan, np.ndarray]]  # int32 [count, width] of each span


class Runner:
    """Runs plans on `mesh`. Compiling starts at once; `set_params` must come before the first step."""

    def __init__(self, model_shape: ModelShape, config: EngineConfig, mesh: Mesh):
        self.config, self.mesh = config, mesh
        self.abstract_params = jax.tree.unflatten(model_shape.treedef, model_shape.leaves)
        self.ladder = token_ladder(config.max_num_batched_tokens)
        self._layouts = {t: StepLayout(t, config.max_num_seqs, config.block_size) for t in self.ladder}
        self._admits = {n: AdmitLayout(n, config.max_num_seqs, config.blocks_per_seq) for n in ADMIT_SIZES}
        self._penalties = PenaltyLayout(model_shape.vocab)
        self._leaves: list[Array] = []
        self._state: DeviceState | None = None
        self._collected_at = 0.0  # time.perf_counter of the last
        self._buckets = self.ladder  # those of the step that is planned now
        self._compiled_buckets: dict[tuple[bool, bool], tuple[int, ...]] = {}  # by sampler and masks
        self._compiled_at = -1  # executables there were when these were last looked for
        self._mask_words = mask_words(model_shape.vocab)
        lowering = Lowering(model_shape, config, mesh)
        self._temp_bound = memory.step_bytes(model_shape, config, mesh)
        check = partial(_check_memory, ("step", self.ladder[-1]), self._temp_bound)
        self.compile_plan = CompilePlan(lowering.jobs(list(self._layouts.values())), check)
        weakref.finalize(self, self.compile_plan.abandon)  # nobody waits for the rest
        self._moves = BlockMoves(self.compile_plan, config.num_blocks, config.max_num_seqs)
        self.costs = PreemptionCosts(host_bytes(lowering.state().kv_pools))

    def set_params(self, params: Params) -> None:
        """Uses `params`, which lie where the executables want them, from the next step on. ValueError for a dtype
        other than that of the parameters before."""
        want = jax.tree_util.tree_leaves_with_path(self.abstract_params)
        leaves = jax.tree.leaves(params)
        for (path, expected), leaf in zip(want, leaves, strict=True):
            if leaf.dtype != expected.dtype:
                name = jax.tree_util.keystr(path)
                raise ValueError(f"parameter {name} is {leaf.dtype}, the engine's is {expected.dtype}; cast it first")
        self._leaves = leaves
        huge_pages.collapse_soon(leaves)

    def lacks_params(self) -> bool:
        """Whether someone has deleted or donated arrays of the parameters."""
        return any(leaf.is_deleted() for leaf in self._leaves)

    def max_tokens(self, full_sampler: bool, masks: bool = False) -> int:
        """How many tokens the next plan may have with the executables compiled so far; 0 while there are none.

        The plan runs in the smallest bucket, of those that have all their executables, that holds it: one that failed
        to compile costs padding. `masks`: some samples have to follow a grammar.
        """
        if self._compiled_at != self.compile_plan.num_done:
            self._compiled_at = self.compile_plan.num_done
            self._compiled_buckets.clear()
        key = full_sampler, masks
        if key not in self._compiled_buckets:
            self._compiled_buckets[key] = tuple(
                t for t in self.ladder if all(map(self.compile_plan.ready, self._names(t, *key)))
            )
        self._buckets = self._compiled_buckets[key]
        return max(self._buckets, default=0)

    def wait_first(
        self, full_sampler: bool = False, masks: bool = False, *, tick: Callable[[], None] = lambda: None
    ) -> None:
        """Blocks until a step can run. Raises `EngineDeadError`, with its cause, if none ever can."""
        self.compile_plan.wait(["init", ("admit", 1)], tick)
        error = None
        for tokens in self.ladder:
            try:
                return self.compile_plan.wait(self._names(tokens, full_sampler, masks), tick)
            except EngineDeadError as failed:
                error = error or failed
        assert error is not None
        raise error

    def _names(self, tokens: int, full_sampler: bool, masks: bool) -> list[Hashable]:
        """The executables of a step. Some steps have no sequence that needs the full sampler, even if it is needed."""
        seqs = self._layouts[tokens].seqs
        names: list[Hashable] = [("step", tokens), ("sample", seqs, False)]
        return names + ["penalties", ("sample", seqs, True)] * full_sampler + [("mask", seqs)] * masks

    def wait_all(self) -> None:
        """Blocks until nothing is left to compile. Raises `EngineDeadError` if something failed to."""
        self.compile_plan.wait_all()

    def close(self) -> None:
        """Stops compiling and lets go of the device's memory."""
        self.compile_plan.close()
        self._state, self._leaves = None, []

    def reset(self) -> None:
        """A fresh, empty state: at the start, and after a failed step took the old one with it."""
        self._state = None  # free the old pool first
        self._moves.clear()
        self._state = self.compile_plan["init"]()

    @property
    def _live(self) -> DeviceState:
        """The state, of which there is one from `reset` to `close`."""
        assert self._state is not None
        return self._state

    def empty_masks(self, forward: Forward) -> np.ndarray:
        """A fresh int32 [seqs, words] for the masks of the step's samples, one bit a token; they allow everything so
        far."""
        assert forward.logits is not None
        return np.full((len(forward.logits), self._mask_words), -1, np.int32)

    def _layout(self, plan: Plan) -> StepLayout:
        return self._layouts[pick_bucket(self._buckets, max(plan.num_tokens, plan.num_samples))]

    def dispatch_forward(self, plan: Plan) -> Forward:
        """Puts the first half of a step on the device's queue, what moves before it first: all but the sampling.
        Awaits nothing. Decode rows take their tokens from the slots, into which the sampling of the step before puts
        them. `dispatch_sample` must follow before the next step."""
        now = time.perf_counter()
        self._state = self._live._replace(kv_pools=self._moves.run(self._live.kv_pools, plan))
        self._admit(plan)
        if not plan.num_tokens:
            return Forward(plan, now, None, None)
        state, layout = self._live, self._layout(plan)
        run = self.compile_plan["step", layout.tokens]
        pools, slots, hidden, logits, sample_slots = run(
            self._leaves, state.kv_pools, state.slots, state.hidden, layout.pack(plan)
        )
        self._state = state._replace(kv_pools=pools, slots=slots, hidden=hidden)
        return Forward(plan, now, logits, sample_slots)

    def dispatch_sample(self, forward: Forward, masks: np.ndarray | None = None) -> Handle:
        """Puts the second half on the queue, and awaits nothing. `masks` is of `empty_masks`, if some samples follow a
        grammar, and is not written any more from now on."""
        plan, now, logits, sample_slots = forward
        if logits is None or sample_slots is None:
            return Handle(plan, now, None, None, [], [])
        result, candidates = sample_slots, None
        if plan.num_samples:
            result, candidates = self._sample(plan, logits, sample_slots, masks)
        result.copy_to_host_async()
        if candidates is not None:
            candidates.copy_to_host_async()
        spans = _prompt_logprob_spans(plan)
        return Handle(plan, now, result, candidates, spans, self._prompt_logprobs(spans) if spans else [])

    def _sample(
        self, plan: Plan, logits: Array, sample_slots: Array, masks: np.ndarray | None
    ) -> tuple[Array, Array | None]:
        """The `result` and `candidates` of a `Handle`."""
        (_, slots, sampling, penalties, _), seqs, allowed = self._live, len(logits), logits
        if masks is not None:
            allowed = self.compile_plan["mask", seqs](logits, masks)
        draw, candidates = self.compile_plan["sample", seqs, plan.full_sampler], None
        if plan.full_sampler:
            last_token, penalties, result, candidates = draw(
                slots.last_token, penalties, slots.length, sampling, logits, allowed, sample_slots
            )
        else:
            last_token, result = draw(slots.last_token, slots.length, sampling, allowed, sample_slots)
        self._state = self._live._replace(slots=slots._replace(last_token=last_token), penalties=penalties)
        return result, candidates if plan.has_beams else None

    def collect(self, handle: Handle) -> Result:
        """Waits for a step. Raises what it raised."""
        if handle.result is None:
            self._moves.settle()
            return Result([], None, None, [])
        result = np.asarray(handle.result)
        self._moves.settle()
        self._observe(handle)
        tokens, logprobs = (result, None) if result.ndim == 1 else (result[:, 0], result[:, 1:])
        prompt_logprobs, at = [], 0
        if handle.spans:
            rows = np.concatenate([np.asarray(part) for part in handle.prompt_logprobs])
            for span in handle.spans:
                end = at + span.stop - span.start
                prompt_logprobs.append((span, rows[at:end]))
                at = end
        candidates = None if handle.candidates is None else np.asarray(handle.candidates)
        return Result(tokens.tolist(), logprobs, candidates, prompt_logprobs)

    def _observe(self, handle: Handle) -> None:
        start, self._collected_at = max(handle.dispatched_at, self._collected_at), time.perf_counter()
        plan = handle.plan
        self.costs.observe_step(plan.num_tokens, plan.num_tokens - len(plan.decodes), self._collected_at - start)

    def knows_bandwidth(self) -> bool:
        """Whether copies to the host and back can be weighed; measures them if they can be, once."""
        if self.costs.copy_bytes_per_s is None and self._moves.is_ready():
            pools, bandwidth = self._moves.measure_bandwidth(self._live.kv_pools)
            self._state = self._live._replace(kv_pools=pools)
            self.costs.copy_bytes_per_s = bandwidth
        return self.costs.copy_bytes_per_s is not None

    def _prompt_logprobs(self, spans: list[PromptLogprobSpan]) -> list[Array]:
        """Computes the spans' log-probabilities from the hidden states of the step just dispatched, `max_num_seqs`
        tokens at a time."""
        self.compile_plan.wait(["prompt_logprobs"])
        run, size = self.compile_plan["prompt_logprobs"], self.config.max_num_seqs
        after = np.concatenate([np.arange(span.at, span.at + span.stop - span.start) for span in spans])
        tokens = np.concatenate([span.sequence.prompt_token_ids[span.start : span.stop] for span in spans])
        results = []
        for i in range(0, len(after), size):
            packed = np.zeros((2, size), np.int32)
            packed[:, : len(after) - i] = after[i : i + size], tokens[i : i + size]
            result = run(self._leaves, self._live.hidden, packed)
            result.copy_to_host_async()
            results.append(result)
        return results

    def _admit(self, plan: Plan) -> None:
        size = ADMIT_SIZES[0]
        if len(plan.admitted) > 1 and self.compile_plan.ready(("admit", ADMIT_SIZES[-1])):
            size = ADMIT_SIZES[-1]
        for at in range(0, len(plan.admitted), size):
            packed = self._admits[size].pack(plan.admitted[at : at + size])
            slots, sampling = self.compile_plan["admit", size](self._live.slots, self._live.sampling, packed)
            self._state = self._live._replace(slots=slots, sampling=sampling)
        for sequence in plan.penalties:
            for packed in self._penalties.pack(sequence):
                penalties = self.compile_plan["penalties"](self._live.penalties, packed)
                self._state = self._live._replace(penalties=penalties)


def _check_memory(largest: Hashable, bound: int, name: Hashable, compiled: jax.stages.Compiled) -> None:
    """Compares the bound that sized the pool, in bytes, with what the compiler says the largest step takes."""
    if name != largest:
        return
    analysis = compiled.memory_analysis()
    if analysis is not None and analysis.temp_size_in_bytes > bound:
        log.warning(
            "the largest step takes %.2f GB of temporary memory, more than the %.2f GB left beside the KV pool; if it "
            "runs out of memory, lower max_num_batched_tokens or num_blocks",
            analysis.temp_size_in_bytes / 1e9,
            bound / 1e9,
        )


def _prompt_logprob_spans(plan: Plan) -> list[PromptLogprobSpan]:
    """The prompt tokens that the step's hidden states predict, of sequences that want to know and don't yet."""
    spans, at = [], len(plan.decodes)
    for sequence, start, stop, _ in plan.chunks:
        if sequence.wants_prompt_logprobs:
            first = max(start, len(sequence.prompt_logprobs)) + 1
            last = min(stop + 1, len(sequence.prompt_token_ids))
            if first < last:
                spans.append(PromptLogprobSpan(sequence, sequence.epoch, first, last, at + first - 1 - start))
        at += stop - start
    return spans
