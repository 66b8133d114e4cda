"""The engine's loop: schedule, run, commit. One thread at a time may call it: `EngineLoop` sees to that."""

import dataclasses
import logging
import time
from collections import abc
from collections.abc import Callable
from typing import Any

from jaxllm.engine.config import EngineConfig
from jaxllm.engine.device.own_settings import with_own_settings
from jaxllm.engine.device.runner import Forward, Handle, Result, Runner
from jaxllm.engine.failure import LACKS_PARAMS, describe, describe_state
from jaxllm.engine.grammar_rows import GrammarRows
from jaxllm.engine.output import Request
from jaxllm.engine.pooling import Pooler, PoolingRequest
from jaxllm.engine.prepare import Intake, PreparedRequest
from jaxllm.engine.requests import OpenRequests, Output
from jaxllm.engine.requests import Request as AnyRequest
from jaxllm.engine.rollout_request import RolloutRequest
from jaxllm.engine.schedule.block_pool import BlockPool
from jaxllm.engine.schedule.plan import StepPlan
from jaxllm.engine.schedule.scheduler import Scheduler
from jaxllm.engine.schedule.sequence import End, Sequence
from jaxllm.engine.schedule.shards import Shards
from jaxllm.engine.scoring import LoglikelihoodRequest
from jaxllm.engine.sleep import KV_CACHE, Sleep
from jaxllm.engine.stats import EngineStats, StepCounter, read_stats
from jaxllm.engine.step_results import commit, end_blocked
from jaxllm.engine.swap_choice import SwapChoice
from jaxllm.errors import EngineDeadError, EngineError
from jaxllm.models.definition import Definition
from jaxllm.models.transformer import Params
from jaxllm.pooling_params import PoolingParams
from jaxllm.sampling_params import SamplingParams

log = logging.getLogger(__name__)

MAX_FAILED_STEPS = 6  # in a row, after which it is not one request's fault


class Engine:
    """Serves requests of token ids on a `Runner`. `vocab` and `eos_ids` are the model's."""

    def __init__(
        self,
        runner: Runner,
        *,
        vocab: int,
        eos_ids: abc.Sequence[int],
        pooler: Pooler,
        tokenizer: Any = None,
        definition: Definition | None = None,
    ):
        self.config: EngineConfig = runner.config
        self.runner = runner
        self.definition = definition  # of the module that is served, as it was given
        self.intake = Intake(self.config, vocab=vocab, eos_ids=eos_ids, tokenizer=tokenizer, pooler=pooler)
        self._swap_choice = SwapChoice(runner, self.config.preemption)
        self.failure: Exception | None = None  # of the last step, if none has succeeded since
        self._num_failed_steps = 0  # in a row
        self._peak_blocks = 0
        self._steps = StepCounter()
        self._dead: BaseException | None = None
        self._sleep = Sleep(runner)
        self.params_version = 0  # of the next step's parameters, as the caller numbers them
        self.is_paused = False  # makes no steps
        self._start_empty()

    @property
    def vocab(self) -> int:
        return self.intake.vocab

    @property
    def tokenizer(self) -> Any:
        return self.intake.tokenizer

    def _start_empty(self) -> None:
        """No requests, an empty pool, and a device state to be built before the next step."""
        runner, config = self.runner, self.config
        schedulers = [
            Scheduler(
                BlockPool(config.num_blocks, config.block_size, config.groups),
                max_num_seqs=config.max_num_seqs,
                prefix_caching=config.enable_prefix_caching,
                prefers_swap=self._swap_choice,
                max_host_pages=config.swap_bytes // config.num_shards // runner.costs.page_bytes,
                whole_prompts=config.whole_prompts,
            )
            for _ in range(config.num_shards)
        ]
        sharing = {"may_share": runner.may_share, "most_tokens": config.max_num_batched_tokens}
        self.scheduler = schedulers[0] if len(schedulers) == 1 else Shards(schedulers, **sharing)
        self.requests = OpenRequests(self.scheduler.finish)
        self._in_flight: Handle | None = None
        self._has_state = self._is_torn = False

    def set_preemption(self, kind: str) -> None:
        """From now on; a kind as in `EngineConfig`."""
        self.config = dataclasses.replace(self.config, preemption=kind)
        self._swap_choice.kind = kind

    def prepare(
        self, token_ids: abc.Sequence[Any], params: SamplingParams | PoolingParams, *, prompt: str | None = None
    ) -> PreparedRequest:
        """Checks a request, in any thread. ValueError says what is wrong with it. Compiling a grammar may take
        seconds."""
        self._sleep.check_awake()
        if isinstance(params, PoolingParams):
            return self.intake.prepare_pooling(token_ids, params, prompt=prompt)
        return self.intake.prepare(token_ids, params, prompt=prompt)

    def prepare_scores(
        self, context: abc.Sequence[Any], continuations: abc.Sequence[abc.Sequence[Any]]
    ) -> PreparedRequest:
        """Likewise, of continuations that are scored."""
        self._sleep.check_awake()
        return self.intake.prepare_scores(context, continuations)

    def submit(
        self,
        prepared: PreparedRequest,
        *,
        request_id: str,
        priority: int = 0,
        stream: bool = False,
        lean: bool = False,
        as_arrays: bool = False,
    ) -> None:
        """Accepts a request that this engine has prepared; ValueError if its id is in use. `stream` and `lean` are as
        in `Request`; one `as_arrays` is a `RolloutRequest`."""
        self._check_alive()
        self._sleep.check_awake()
        if request_id in self.requests:
            raise ValueError(f"request id {request_id!r} is in use; choose another")
        given = {"request_id": request_id, "prompt": prepared.prompt, "prompt_token_ids": prepared.token_ids}
        if prepared.pooling is not None:
            pooler = self.intake.pooler
            request = PoolingRequest(**given, params=prepared.pooling, pooler=pooler, lean=lean)
            group = self.intake.pooled_sequence(prepared, request, priority)
        elif prepared.continuations is not None:
            request = LoglikelihoodRequest(**given, lean=lean)
            group = self.intake.scored_sequences(prepared, request, priority)
        elif as_arrays:
            request = RolloutRequest(**given, with_logprobs=prepared.params.wants_logprobs)
            group = self.intake.sequences(prepared, request, priority)
        else:
            tokenizer = self.intake.tokenizer
            request = Request(**given, params=prepared.params, tokenizer=tokenizer, stream=stream, lean=lean)
            group = self.intake.sequences(prepared, request, priority)
        request.sequences = group.sequences[:1] if prepared.params.beam_width is not None else list(group.sequences)
        self.requests.add(request)
        self.scheduler.add(group)

    def add(
        self, token_ids: abc.Sequence[Any], params: SamplingParams | PoolingParams, *, request_id: str, **options: Any
    ) -> None:
        """`prepare` and `submit`, for those who drive an engine themselves."""
        self.submit(self.prepare(token_ids, params), request_id=request_id, **options)

    def abort(self, request_id: str) -> Output | None:
        """Ends a request between two steps and frees its blocks; returns what there is of it. None if there is no such
        request (any more)."""
        request = self._drop(request_id)
        return None if request is None else self.requests.output(request)

    def drop(self, request_id: str) -> None:
        """As `abort`, for a request that nobody listens to."""
        self._drop(request_id)

    def _drop(self, request_id: str) -> AnyRequest | None:
        if self._is_torn:
            self._start_empty()
        return self.requests.end(request_id, "abort")

    def has_work(self) -> bool:
        """Whether something is in flight, or a request's end has not been returned yet."""
        return self._in_flight is not None or len(self.requests) > 0

    @property
    def may_step(self) -> bool:
        """Whether there is work, and it is not paused."""
        return not self.is_paused and self.has_work()

    def wait_ready(self) -> None:
        """Blocks until the executables of the next step are compiled. It may be interrupted: nothing changes here."""
        least = self.scheduler.least_tokens() if self._in_flight is None else 1
        if self.runner.max_tokens(self._needs_full_sampler) < least:
            self.runner.wait_first(self._needs_full_sampler, num_tokens=least)
        self.runner.wait_expected()

    @property
    def _needs_full_sampler(self) -> bool:
        """Whether some unfinished sequence does."""
        return self.scheduler.num_unfinished_full > 0

    @with_own_settings
    def step(self) -> list[Output]:
        """Dispatches one step, then commits the one before it. Returns the requests that have updates: all that
        finished, and those that stream.

        A step that fails on the device is computed again. Any other exception, a `KeyboardInterrupt` among them, tears
        the step: the requests are lost, and the next call starts with an empty engine.
        """
        self._check_alive()
        self.wait_ready()
        if not self._has_state:
            self._build_state()
        self._is_torn = True  # unless it comes to its end
        self.runner.compile_plan.stepped(is_stepping=True)
        start = time.monotonic()
        updates = self._step()
        self._steps.seconds += time.monotonic() - start
        self._is_torn = False
        self.runner.compile_plan.stepped(is_stepping=self._in_flight is not None)
        return updates

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise EngineDeadError(f"the engine is dead: {self._dead}") from self._dead
        if self._is_torn:
            self._start_empty()

    def _step(self) -> list[Output]:
        plan = self._schedule()
        done, self._in_flight = self._in_flight, None
        failed: tuple[StepPlan, Exception] | None = None
        unsampled: tuple[Forward, GrammarRows] | None = None  # whose masks depend on the step before
        updated: list[Sequence] = []
        if plan is not None:
            try:
                rows = GrammarRows(plan)
                plan.awaits_masks = bool(rows)
                forward = self.runner.dispatch_forward(plan)
                if rows.await_commit:
                    unsampled = forward, rows
                else:
                    updated += self._sample(forward, rows)
            except Exception as error:  # noqa: BLE001 - whatever it was, the donated state is gone
                failed = plan, error
        if done is not None:
            start = time.monotonic()
            try:
                result = self.runner.collect(done)
                self._steps.wait_s += time.monotonic() - start
            except Exception as error:  # noqa: BLE001 - raised on the device; the step after it has no state either
                failed = done.plan, error
            else:
                updated += self._commit(done.plan, result)
        if unsampled is not None and failed is None:
            try:
                updated += self._sample(*unsampled)
            except Exception as error:  # noqa: BLE001 - as above
                failed = unsampled[0].plan, error
        if failed is not None:
            updated += self._recover(*failed)
        return self.requests.updates(updated)

    def _schedule(self) -> StepPlan | None:
        limit = self.runner.max_tokens(self._needs_full_sampler)
        plan = self.scheduler.schedule(limit)
        if plan is not None:
            is_cut = limit <= plan.most_tokens < self.config.max_num_batched_tokens  # for want of an executable
            for shard in plan.shards:
                shard.params_version = self.params_version
            plan.num_wanted = plan.most_tokens + (self.scheduler.num_left_tokens() if is_cut else 0)
            plan.num_sequences = self.scheduler.num_sequences
            self._steps.count(plan.num_tokens)
            for sequence, _ in plan.admitted:
                sequence.request.scheduled()
            self._peak_blocks = max(self._peak_blocks, self.scheduler.num_used)
        return plan

    def _sample(self, forward: Forward, rows: GrammarRows) -> list[Sequence]:
        """Dispatches a step's sampling. Returns the sequences that end because their grammars allow no token."""
        if not rows:
            self._in_flight = self.runner.dispatch_sample(forward)
            return []
        masks = self.runner.empty_masks(forward.plan)
        blocked = rows.fill(self.intake.grammars, masks)
        self._in_flight = self.runner.dispatch_sample(forward, masks)
        return [end_blocked(self.scheduler, sequence) for sequence in blocked]

    def _commit(self, plan: StepPlan, result: Result) -> list[Sequence]:
        if len(result.tokens) or result.pooled or result.prompt_logprobs:
            self.failure, self._num_failed_steps = None, 0
        return commit(self.scheduler, plan, result)

    def _build_state(self) -> None:
        try:
            self.runner.wait_first()
            self.runner.reset()
        except Exception as error:
            self._dead = error
            raise EngineDeadError(
                f"the device state could not be built: {describe_state(error, self.config)}"
            ) from error
        self._has_state = True

    def _recover(self, plan: StepPlan, error: Exception) -> list[Sequence]:
        """The device's state is gone, and all requests start over. Returns the sequences that end for it: those that
        were in several failed steps, and all if every step fails."""
        log.error("a step of %d tokens failed and is recomputed: %s", plan.num_tokens, error)
        self.failure = error.with_traceback(None)  # whose frames would keep the engine alive
        self._in_flight, self._has_state = None, False
        self._num_failed_steps += 1
        cause = describe(error, self.runner)
        unfinished = [one for request in self.requests for one in request.sequences if one.end is None]
        ended = self.scheduler.restart(unfinished, plan.rows, cause)
        if self._num_failed_steps >= MAX_FAILED_STEPS:
            self._num_failed_steps = 0
            for sequence in unfinished:
                if sequence.end is None:
                    error_text = f"the last {MAX_FAILED_STEPS} steps failed: {cause}"
                    self.scheduler.finish(sequence, End("error", error=error_text))
                    ended.append(sequence)
        self._build_state()
        return ended

    @with_own_settings
    def update_params(
        self, params: Params, *, version: int | None = None, recompute: bool = False, keep_prefix: bool = False
    ) -> None:
        """Replaces the parameters between two steps. Running requests go on over the keys and values that the old ones
        made, unless they `recompute` them: a step that is in flight then counts for nothing. The prefix cache, which
        came from the old ones, is dropped unless `keep_prefix`. `version` is the next one if it is None."""
        self._sleep.set_params(params)
        self.params_version = self.params_version + 1 if version is None else version
        if recompute and self._has_state:
            self.scheduler.restart([one for request in self.requests for one in request.sequences if one.end is None])
            self._in_flight, self._has_state = None, False
        elif not keep_prefix:
            self.scheduler.forget_keys()

    def check_params(self) -> None:
        """Raises `EngineError` if someone has deleted or donated the parameters. O(parameters' arrays)."""
        if self.runner.lacks_params():
            raise EngineError(LACKS_PARAMS)

    @with_own_settings
    def sleep(self, level: int | None = None, *, kv: bool = True, params: bool = False) -> None:
        """Gives the device's memory away, between two steps; arguments and errors are those of `LLM.sleep`."""
        if len(self.requests):
            raise ValueError(f"{len(self.requests)} requests run; let them finish, or abort them, before sleep")
        while self._in_flight is not None:
            self.step()
        self._sleep.fall(level, kv=kv, params=params)
        if KV_CACHE in self._sleep.given_away:
            self.scheduler.forget_keys()
            self._has_state = False

    @with_own_settings
    def wake_up(self, tags: abc.Collection[str] | None = None) -> None:
        """Takes the memory back that `tags` name, "weights" and "kv_cache"; None for both."""
        self._sleep.wake(tags)
        if KV_CACHE not in self._sleep.given_away and not self._has_state:
            self._build_state()

    @property
    def is_sleeping(self) -> bool:
        return bool(self._sleep.given_away)

    def wait_compiled(self, tick: Callable[[], None] = lambda: None, *, first: bool = False) -> None:
        """Blocks until all executables (or `first`: enough to serve) are compiled."""
        if first:
            self.runner.wait_first(tick=tick)
        else:
            self.runner.wait_all()

    def expect_full_sampler(self) -> None:
        """Has what most requests will need compiled early."""
        self.runner.want_first(full_sampler=True)

    def stats(self) -> EngineStats:
        return read_stats(self.scheduler, self.runner.compile_plan, self._peak_blocks, self._steps)

    def close(self) -> None:
        """Stops compiling and frees the device's memory."""
        self.runner.close()
        self._dead = self._dead or RuntimeError("it was closed")
