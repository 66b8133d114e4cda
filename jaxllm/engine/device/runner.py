"""Runs plans on a device: encodes them, has an executor apply them, and reads what comes back."""

import time
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from jaxllm.engine.config import EngineConfig
from jaxllm.engine.device.commands import Command
from jaxllm.engine.device.compile_plan import CompilePlan
from jaxllm.engine.device.demand import Demand
from jaxllm.engine.device.encoder import Buckets, Encoder, PromptLogprobSpan, spans_of
from jaxllm.engine.device.packing import pick_bucket
from jaxllm.engine.schedule.plan import PooledSpan, StepPlan
from jaxllm.engine.schedule.preemption_costs import PreemptionCosts
from jaxllm.errors import EngineDeadError
from jaxllm.models.transformer import Params


@runtime_checkable
class CommandExecutor(Protocol):
    """What applies commands: `executor.Executor`, or what stands for it."""

    @property
    def compile_plan(self) -> CompilePlan: ...
    @property
    def mesh(self) -> Mesh: ...
    @property
    def abstract_params(self) -> Params: ...
    @property
    def leaves(self) -> list[Array]:
        """Of the parameters."""
        ...

    @property
    def page_bytes(self) -> int: ...
    def offer_params(self, version: int, params: Params) -> None: ...
    def lacks_params(self) -> bool: ...
    def apply(self, commands: Sequence[Command]) -> list[Any]: ...
    def close(self) -> None: ...


class Forward(NamedTuple):
    """A step whose forward pass is dispatched, and whose samples are not yet."""

    plan: StepPlan
    bucket: int  # of tokens; 0 if the plan has no rows
    dispatched_at: float  # seconds of time.perf_counter
    done: list[Array]  # what is there once it is over; nothing if the plan has no rows
    sampled: list[Array] | None  # what came of the sampling, where that was dispatched with it


class Handle(NamedTuple):
    """A dispatched step: its plan, and what the host will read of it, which is on its way there. Arrays have the rows
    of one shard after the other, with padding after each shard's."""

    plan: StepPlan
    bucket: int  # as of `Forward`, and so the next two
    dispatched_at: float
    done: list[Array]
    tokens: Array | None  # int32 [samples]: the sampled tokens; or [samples, width]: with their log-probabilities
    candidates: Array | None  # int32 [samples, width] if there are beams
    spans: list[list[PromptLogprobSpan]]  # of each shard
    prompt_logprobs: list[Array]  # int32 [rows, width] of a shard's spans' tokens, one span after the other; and so on
    pooled: Array | None  # float32 [rows, outputs] of the plan's pooled spans, and padding


class Result(NamedTuple):
    """A step that is over."""

    tokens: np.ndarray  # int32, of each sample, then padding
    logprobs: np.ndarray | None  # int32 [samples, width] of the full sampler; see engine/logprobs.py
    candidates: np.ndarray | None  # int32 [samples, width] if there are beams; see beam/candidates.py
    prompt_logprobs: list[tuple[PromptLogprobSpan, np.ndarray]]  # int32 [count, width] of each span
    pooled: list[tuple[PooledSpan, np.ndarray]]  # float32 [outputs] of each that ends


class Runner:
    """Runs plans on `executor`, for a model of `vocab` tokens. `set_params` must come before the first step.
    `kv_scales` is the command that gives a pool of 8-bit numbers its scales, or measures them."""

    def __init__(self, executor: CommandExecutor, config: EngineConfig, vocab: int, kv_scales: Command | None = None):
        self.config, self.executor = config, executor
        self._kv_scales = [] if kv_scales is None else [kv_scales]
        self.compile_plan = executor.compile_plan
        self._encoder = Encoder(config, vocab, self.compile_plan.ready)
        self._params_version = 0
        self._num_unsettled = 0  # steps to be collected until everything that is swapped is where it should be
        self._collected_at = 0.0  # time.perf_counter of the last
        self._buckets = self._encoder.all  # those of the step that is planned now
        self._usable: dict[bool, Buckets] = {}  # with and without the full sampler
        self._compiled_at = -1  # executables there were when these were last looked for
        self._demand = Demand(self._buckets.tokens, free_padding=config.free_padding)
        self._expected: list[Hashable] = []  # executables that will be there before steps without them are over
        weakref.finalize(self, self.compile_plan.abandon)  # nobody waits for the rest
        self.costs = PreemptionCosts(executor.page_bytes)

    def set_params(self, params: Params, source: str = "") -> None:
        """Uses `params`, which lie where the executables want them, from the next step on; `source` is as in `Command`.
        Scales of keys and values that are measured are measured anew. ValueError for a dtype other than that of the
        parameters before."""
        version = self._params_version + 1
        self.executor.offer_params(version, params)
        self.executor.apply([Command("update_params", key=version, source=source), *self._kv_scales])
        self._params_version = version
        self.compile_plan.stepped(is_stepping=False)

    def lacks_params(self) -> bool:
        """Whether someone has deleted or donated arrays of the parameters."""
        return self.executor.lacks_params()

    def max_tokens(self, full_sampler: bool) -> int:
        """How many tokens the next plan may have with the executables compiled so far; 0 while there are none.

        The plan runs in the smallest bucket, of those that have all their executables, that holds it: one that failed
        to compile costs padding.
        """
        if self._compiled_at != self.compile_plan.num_done:
            self._compiled_at = self.compile_plan.num_done
            self._usable.clear()
        if full_sampler not in self._usable:
            self._usable[full_sampler] = self._encoder.usable(full=full_sampler)
        self._buckets = self._usable[full_sampler]
        return max(self._buckets.tokens, default=0)

    def may_share(self) -> bool:
        """Whether shards may compute a prompt together in the next step, if that has room for as many tokens as any."""
        return self._encoder.may_share()

    def wait_first(
        self, full_sampler: bool = False, *, num_tokens: int = 1, tick: Callable[[], None] = lambda: None
    ) -> None:
        """Blocks until a step of `num_tokens` can run. Raises `EngineDeadError`, with its cause, if none ever can."""
        self.compile_plan.wait(["init", ("admit", 1)], tick)
        error = None
        for tokens in (size for size in self._encoder.all.tokens if size >= num_tokens):
            try:
                return self.compile_plan.wait(self._encoder.names(tokens, full=full_sampler), tick)
            except EngineDeadError as failed:
                error = error or failed
        assert error is not None
        raise error

    def want_first(self, *, full_sampler: bool) -> None:
        """Has the executables of the smallest step compiled next."""
        self.compile_plan.want(self._encoder.names(self._encoder.all.tokens[0], full=full_sampler))

    def wait_expected(self) -> None:
        """Blocks while an executable is compiled with which the prompt at hand, alone so far, is over sooner."""
        if self._expected:
            names, self._expected = self._expected, []
            self.compile_plan.settle(names)

    def wait_all(self) -> None:
        """Blocks until nothing is left to compile. Raises `EngineDeadError` if something failed to."""
        self.compile_plan.wait_all()

    def close(self) -> None:
        """Stops compiling and lets go of the device's memory."""
        self.executor.close()

    def reset(self) -> None:
        """A fresh, empty state: at the start, and after a failed step took the old one with it."""
        self.executor.apply([Command("init")])

    def empty_masks(self, plan: StepPlan) -> np.ndarray:
        """See `Encoder.empty_masks`."""
        return self._encoder.empty_masks(plan, self._buckets)

    def dispatch_forward(self, plan: StepPlan) -> Forward:
        """Puts a step on the device's queue, what moves before it first; the sampling too, unless that waits for
        masks. Awaits nothing. `dispatch_sample` must follow before the next step."""
        now = time.perf_counter()
        if plan.has_swaps:
            self._num_unsettled = 2
        bucket = pick_bucket(self._buckets.tokens, plan.most_tokens) if plan.num_tokens else 0
        if plan.shared is not None:
            bucket = self.config.max_num_batched_tokens
        commands, num_done = self._encoder.encode_forward(plan, self._buckets), int(bucket > 0)
        if not plan.awaits_masks:
            commands += self._encoder.encode_sample(plan, self._buckets)
        results = self.executor.apply(commands)
        sampled = None if plan.awaits_masks else results[num_done:]
        return Forward(plan, bucket, now, results[:num_done], sampled)

    def dispatch_sample(self, forward: Forward, masks: np.ndarray | None = None) -> Handle:
        """Puts the sampling on the queue, where it is not there yet, and awaits nothing. `masks` is of `empty_masks`,
        if the plan awaits some, and is not written any more from now on."""
        plan, bucket, now, done, results = forward
        if results is None:
            results = self.executor.apply(self._encoder.encode_sample(plan, self._buckets, masks))
        pooled = results.pop(0) if plan.pooled else None
        tokens = candidates = None
        if plan.num_samples:
            if plan.full_sampler:
                candidates = results.pop()
            tokens = results.pop()
        if not plan.has_chosen:
            candidates = None
        for result in (tokens, candidates, pooled, *results):
            if result is not None:
                result.copy_to_host_async()
        spans = [spans_of(each) for each in plan.shards]
        return Handle(plan, bucket, now, done, tokens, candidates, spans, results, pooled)

    def collect(self, handle: Handle) -> Result:
        """Waits for a step. Raises what it raised."""
        shards = handle.plan.shards
        num_samples = [plan.num_samples for plan in shards]
        tokens, logprobs = np.zeros(0, np.int32), None
        if handle.tokens is not None:
            tokens = _real_rows(np.asarray(handle.tokens), num_samples)
            if tokens.ndim > 1:
                tokens, logprobs = tokens[:, 0], tokens[:, 1:]
        else:
            jax.block_until_ready(handle.done)
        candidates = None if handle.candidates is None else _real_rows(np.asarray(handle.candidates), num_samples)
        pooled = []
        if handle.pooled is not None:
            rows = _real_rows(np.asarray(handle.pooled), [len(plan.pooled) for plan in shards])
            pooled = list(zip(handle.plan.pooled, rows, strict=False))
        prompt_logprobs = _of_spans(handle.spans, handle.prompt_logprobs)
        if self._num_unsettled:
            self._num_unsettled -= 1
            self.executor.apply([Command("settle")])
        if handle.done:
            self._observe(handle)
        pooled = [(span, row) for span, row in pooled if span.ends]
        return Result(tokens, logprobs, candidates, prompt_logprobs, pooled)

    def _observe(self, handle: Handle) -> None:
        start, self._collected_at = max(handle.dispatched_at, self._collected_at), time.perf_counter()
        plan, seconds = handle.plan, self._collected_at - start
        most = max(plan.shards, key=lambda shard: shard.num_tokens)  # the others wait for it
        self.costs.observe_step(most.num_tokens, most.num_tokens - len(most.decodes), seconds)
        compiled = self.compile_plan
        if compiled.num_done < compiled.total:
            is_quick, patience = compiled.is_passing(("step", handle.bucket)), compiled.longest_s
            lacks = self._demand.observe(plan.num_wanted, handle.bucket, seconds, patience=patience, is_quick=is_quick)
            if lacks is not None:
                names = self._encoder.names(lacks, full=plan.full_sampler)
                compiled.want([*names, *self._names_of_decodes(plan, lacks)])
                self._expected = [] if plan.num_samples else names

    def _names_of_decodes(self, plan: StepPlan, most: int) -> list[Hashable]:
        """The executables of a step, of at most `most` tokens, in which all that run or wait decode; none where that of
        `most` takes little longer for them."""
        if not self.config.generates or self.config.free_padding:
            return []
        num_tokens = min(most, plan.num_sequences, self.config.max_num_seqs)
        return self._encoder.names(pick_bucket(self._encoder.all.tokens, num_tokens), full=plan.full_sampler)

    def knows_bandwidth(self) -> bool:
        """Whether copies to the host and back can be weighed; measures them if they can be, once."""
        if self.costs.copy_bytes_per_s is None and (measure := self._encoder.encode_measurement()) is not None:
            (found,) = self.executor.apply([measure])
            self.costs.copy_bytes_per_s = float(found[0])
        return self.costs.copy_bytes_per_s is not None


def _real_rows(rows: np.ndarray, counts: Sequence[int]) -> np.ndarray:
    """Those of several shards, without padding: `rows` has as many of each, of which `counts` say how many are real.
    One shard's padding stays."""
    if len(counts) == 1:
        return rows
    each = zip(np.split(rows, len(counts)), counts, strict=True)
    return np.concatenate([of_shard[:count] for of_shard, count in each])


def _of_spans(
    spans: Sequence[Sequence[PromptLogprobSpan]], parts: Sequence[Array]
) -> list[tuple[PromptLogprobSpan, np.ndarray]]:
    """The rows of each shard's spans, of which each of the `parts` has some."""
    if not parts:
        return []
    found, split = [], [np.split(np.asarray(part), len(spans)) for part in parts]
    for shard, of_shard in enumerate(spans):
        rows, at = np.concatenate([part[shard] for part in split]), 0
        for span in of_shard:
            end = at + len(span.token_ids)
            found.append((span, rows[at:end]))
            at = end
    return found
