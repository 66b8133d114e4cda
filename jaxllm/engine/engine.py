"""The engine's loop: schedule, run, commit. Single-threaded; `LLM` and `AsyncLLM` drive it."""

import dataclasses
import itertools
import logging
import random
from collections import abc
from collections.abc import Callable
from typing import Any

from jaxllm.engine.beam.group import BeamSearchGroup, read_rows
from jaxllm.engine.config import EngineConfig
from jaxllm.engine.device.packing import NUM_STOP_IDS
from jaxllm.engine.device.runner import Handle, Result, Runner
from jaxllm.engine.intake import bad_word_ids, check_params, check_prompt, check_room
from jaxllm.engine.logprobs import pack_logprobs
from jaxllm.engine.output import Request
from jaxllm.engine.schedule.block_pool import BlockPool
from jaxllm.engine.schedule.plan import Plan
from jaxllm.engine.schedule.scheduler import Scheduler
from jaxllm.engine.schedule.sequence import Samples, Sequence, SequenceGroup
from jaxllm.engine.stats import EngineStats, StepCounter, read_stats
from jaxllm.errors import EngineDeadError
from jaxllm.grammar.compiler import Grammar, GrammarCompiler
from jaxllm.models.transformer import Params
from jaxllm.outputs import RequestOutput
from jaxllm.sampling_params import MAX_STOP_TOKEN_IDS, SamplingParams
from jaxllm.text.detokenizer import Detokenizer

log = logging.getLogger(__name__)


class Engine:
    """Serves requests of token ids on a `Runner`. `vocab` and `eos_ids` are the model's."""

    def __init__(self, runner: Runner, *, vocab: int, eos_ids: abc.Sequence[int], tokenizer: Any = None):
        self.config: EngineConfig = runner.config
        self.runner, self.tokenizer = runner, tokenizer
        self.vocab, self.eos_ids = vocab, frozenset(eos_ids)
        self._grammars = GrammarCompiler(tokenizer, vocab, self.eos_ids)
        if len(self.eos_ids) + MAX_STOP_TOKEN_IDS > NUM_STOP_IDS:
            most = NUM_STOP_IDS - MAX_STOP_TOKEN_IDS
            raise ValueError(f"the model has {len(self.eos_ids)} end-of-sequence ids; at most {most} are supported")
        self.scheduler = Scheduler(
            BlockPool(self.config.num_blocks, self.config.block_size),
            max_num_seqs=self.config.max_num_seqs,
            prefix_caching=self.config.enable_prefix_caching,
            prefers_swap=self._prefers_swap,
            max_host_blocks=self.config.swap_bytes // runner.costs.block_bytes,
        )
        self._rng = random.Random(self.config.seed)
        self._arrivals = itertools.count()
        self._requests: dict[str, Request] = {}
        self._in_flight: Handle | None = None
        self._interrupted = True  # the device state is unknown: build one before the next step
        self._peak_blocks = 0
        self._steps = StepCounter()
        self._dead: BaseException | None = None

    def set_preemption(self, kind: str) -> None:
        """From now on; a kind as in `EngineConfig`."""
        self.config = dataclasses.replace(self.config, preemption=kind)

    def _prefers_swap(self, num_blocks: int, num_tokens: int) -> bool:
        if self.config.preemption == "auto":
            return self.runner.knows_bandwidth() and self.runner.costs.prefers_swap(num_blocks, num_tokens)
        return self.config.preemption == "swap"

    # ---- requests

    def add(
        self,
        prompt_token_ids: abc.Sequence[int],
        params: SamplingParams,
        *,
        request_id: str,
        prompt: str | None = None,
        priority: int = 0,
        stream: bool = False,
        grammar: Grammar | None = None,
    ) -> None:
        """Accepts a request, or raises `ValueError` with what is wrong with it. Everything is checked here. `grammar`
        is what `compile_grammar` made of the parameters, if someone has called it where it holds up nobody."""
        if self._dead is not None:
            raise EngineDeadError(f"the engine is dead: {self._dead}") from self._dead
        if request_id in self._requests:
            raise ValueError(f"request id {request_id!r} is in use; choose another")
        prompt_token_ids = self.validate(prompt_token_ids, params)
        grammar = grammar or self.compile_grammar(params)
        request = Request(
            request_id=request_id,
            prompt=prompt,
            prompt_token_ids=prompt_token_ids,
            params=params,
            tokenizer=self.tokenizer,
            stream=stream,
        )
        siblings = self._siblings(request, priority, grammar)
        self._requests[request_id] = request
        self.scheduler.add(siblings)

    def compile_grammar(self, params: SamplingParams) -> Grammar | None:
        """The grammar of `structured_outputs`, if there is one: in any thread, as it may take seconds. ValueError for
        one that can't be used."""
        return None if params.structured_outputs is None else self._grammars.compile(params.structured_outputs)

    def warm_up_grammars(self) -> None:
        """Prepares for the first grammar, in any thread. With a large vocabulary this holds the interpreter's lock for
        a second, so that it had better be done before anyone waits for a step. ValueError if there can be none."""
        self._grammars.warm_up()

    def _siblings(self, request: Request, priority: int, grammar: Grammar | None) -> SequenceGroup:
        """The sequences of a request, of which `request` gets those whose ends it tells."""
        params = request.params
        seed = params.seed if params.seed is not None else self._rng.getrandbits(64)
        bad_words = bad_word_ids(params, self.tokenizer)
        sequences = [
            self._sequence(request, index, seed, priority, bad_words, grammar)
            for index in range(params.beam_width or params.num_samples)
        ]
        if params.beam_width is not None:
            request.sequences = sequences[:1]
            return BeamSearchGroup(sequences, self._text_to_watch(request))
        request.sequences = list(sequences)
        return Samples(sequences)

    def _text_to_watch(self, request: Request) -> Detokenizer | None:
        """What finds the stop strings of beams."""
        if not request.params.stops:
            return None
        try:
            return Detokenizer(self.tokenizer, request.params, request.prompt_token_ids)
        except Exception as error:  # noqa: BLE001 - a tokenizer may raise anything
            raise ValueError(f"stop strings can't be found, as the tokenizer fails on the prompt: {error}") from error

    def validate(self, prompt_token_ids: abc.Sequence[Any], params: SamplingParams) -> list[int]:
        """The prompt as a list, if this engine can serve it with `params`; ValueError otherwise."""
        ids = check_prompt(prompt_token_ids, self.vocab, self.config.max_model_len)
        check_params(params, self.vocab, self.tokenizer)
        check_room(ids, params, self.config)
        return ids

    def _sequence(
        self,
        request: Request,
        index: int,
        seed: int,
        priority: int,
        bad_words: list[list[int]],
        grammar: Grammar | None,
    ) -> Sequence:
        params, prompt = request.params, request.prompt_token_ids
        eos_ids = frozenset() if params.ignore_eos else self.eos_ids
        limit = self.config.max_model_len
        if params.max_tokens is not None:
            limit = min(limit, len(prompt) + params.max_tokens)
        return Sequence(
            prompt_token_ids=prompt,
            params=params,
            arrival=next(self._arrivals),
            seed=seed,
            sample_index=index,
            max_total_len=limit,
            stop_ids=eos_ids.union(params.stop_token_ids),
            eos_ids=eos_ids,
            priority=priority,
            bad_words=bad_words,
            request=request,
            host_dependent=params.beam_width is not None or grammar is not None,
            matcher=None if grammar is None else grammar.matcher(),
        )

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a request at any time and frees its blocks; None if there is no such request (any more)."""
        if self._interrupted:
            self._start_over([])
        request = self._requests.pop(request_id, None)
        if request is None:
            return None
        for sequence in request.sequences:
            self.scheduler.finish(sequence, "abort")
        return self._guarded(request, request.output) or request.output()

    def has_work(self) -> bool:
        """Whether something is in flight, or a request's end has not been returned yet."""
        return self._in_flight is not None or bool(self._requests)

    # ---- the loop

    def step(self) -> list[RequestOutput]:
        """Dispatches one step, then commits the one before it. Returns the requests that have updates: all that
        finished, and those that stream. An exception other than the device's leaves the engine usable."""
        if self._dead is not None:
            raise EngineDeadError(f"the engine is dead: {self._dead}") from self._dead
        if self._interrupted:  # by the first call, or by Ctrl-C in the middle of the last one
            finished = self._rebuild([])
            if finished:
                self._interrupted = False
                return self._updates(finished)
        self._interrupted = True
        updates = self._step()
        self._interrupted = False
        return updates

    def _step(self) -> list[RequestOutput]:
        scheduler = self.scheduler
        needs = scheduler.num_unfinished_full > 0, scheduler.num_unfinished_masked > 0
        max_tokens = self.runner.max_tokens(*needs)
        if not max_tokens:
            self.runner.wait_first(*needs)
            max_tokens = self.runner.max_tokens(*needs)
        plan = scheduler.schedule(max_tokens)
        done, self._in_flight = self._in_flight, None
        failed: tuple[Plan, Exception] | None = None
        finished: list[Sequence] = []
        if plan is not None:
            self._steps.count(plan.num_tokens)
            for chunk in plan.chunks:
                chunk.sequence.request.scheduled()
            self._peak_blocks = max(self._peak_blocks, scheduler.pool.num_used)
            blocked = self._fill_masks(plan) if needs[1] else []
            try:
                self._in_flight = self.runner.dispatch(plan)
            except Exception as error:  # noqa: BLE001 - whatever it was, the donated state is gone
                failed = plan, error
            finished = [self._end_blocked(sequence) for sequence in blocked]
        updated: list[Sequence] = []
        if done is not None:
            try:
                result = self.runner.collect(done)
            except Exception as error:  # noqa: BLE001 - raised on the device; the step after it has no state either
                failed = done.plan, error
            else:
                updated = scheduler.commit(done.plan, result.tokens, *self._read(done.plan, result))
        if failed is not None:
            updated += self._recover(*failed)
        return self._updates(updated + finished)

    def _fill_masks(self, plan: Plan) -> list[Sequence]:
        """Gives the plan's samples the masks of their grammars; returns those that can't go on."""
        bound = [(sequence, row) for row, sequence in enumerate(plan.samples) if sequence.matcher is not None]
        if not bound:
            return []
        plan.masks = self.runner.empty_masks(plan)
        for sequence, _ in bound:
            sequence.matcher.follow(sequence.output_token_ids)
        self._grammars.fill([(sequence.matcher, row) for sequence, row in bound], plan.masks)
        allowed = plan.masks.any(axis=1)  # a beam without a token just ends, if others go on
        return [r for r, row in bound if r.matcher.error or not (allowed[row] or r.is_beam)]

    def _end_blocked(self, sequence: Sequence) -> Sequence:
        """Ends a request whose grammar allows no token; returns it, or who stands for it."""
        matcher, sequence = sequence.matcher, sequence.group.head(sequence)
        is_whole = matcher.error is None and matcher.may_end
        if not is_whole:
            sequence.error = matcher.error or "no token of the model's is allowed by its grammar"
        self.scheduler.finish(sequence, "stop" if is_whole else "error")
        return sequence

    def _read(self, plan: Plan, result: Result) -> tuple[list[Any] | None, list[Any] | None]:
        """Gives requests the log-probabilities of their prompts; returns what is to be kept of each sample's token,
        and how each beam may go on."""
        for span, rows in result.prompt_logprobs:
            sequence = span.sequence
            if sequence.epoch == span.epoch:
                kept = [pack_logprobs(row, sequence.params.prompt_logprobs) for row in rows]
                sequence.prompt_logprobs[span.start - 1 :] = kept
        if result.logprobs is None:
            return None, None
        logprobs = [
            pack_logprobs(row, sequence.params.num_top_logprobs, sequence.params.logprob_token_ids or ())
            if sequence.params.tracks_logprobs
            else None
            for sequence, row in zip(plan.samples, result.logprobs, strict=False)
        ]
        if result.candidates is None:
            return logprobs, None
        return logprobs, read_rows(plan.samples, result.candidates, logprobs)

    def _updates(self, updated: abc.Sequence[Sequence]) -> list[RequestOutput]:
        changed: dict[str, Request] = {}
        for sequence in updated:
            request = sequence.request
            if request.watches_text:
                self._guarded(request, lambda: self._watch_text(request, sequence))  # noqa: B023 - called at once
            if request.stream or sequence.finish_reason:
                changed[request.request_id] = request
        updates = []
        for request_id, request in changed.items():
            if request.finished:
                self._requests.pop(request_id, None)
            if request.has_update:
                updates.append(self._guarded(request, request.output) or request.output())
        return updates

    def _watch_text(self, request: Request, sequence: Sequence) -> None:
        stop = request.decode(sequence)
        if stop is not None:
            self.scheduler.finish(sequence, "stop")
            sequence.finish_reason, sequence.stop_reason = "stop", stop  # also if its length ended it just now

    def _guarded(self, request: Request, work: Callable[[], Any]) -> Any:
        """Does one request's own work; if that fails, the request ends, and its neighbours go on."""
        try:
            return work()
        except Exception as error:  # noqa: BLE001 - a tokenizer may raise anything
            log.exception("request %s failed on the host", request.request_id)
            request.fail(f"decoding its text failed: {error}")
            for sequence in request.sequences:
                self.scheduler.finish(sequence, "error")
            for sequence in request.shown:
                sequence.finish_reason = "error"

    # ---- failure

    def _recover(self, plan: Plan, error: Exception) -> list[Sequence]:
        log.error("a step of %d tokens failed and is recomputed: %s", plan.num_tokens, error)
        return self._rebuild(plan.rows)

    def _rebuild(self, failed_rows: abc.Sequence[Sequence]) -> list[Sequence]:
        """A new device state; see `_start_over`."""
        finished = self._start_over(failed_rows)
        try:
            self.runner.wait_first()
            self.runner.reset()
        except Exception as error:
            self._dead = error
            raise EngineDeadError(f"the device state could not be built: {error}") from error
        return finished

    def _start_over(self, failed_rows: abc.Sequence[Sequence]) -> list[Sequence]:
        """All unfinished requests start over. Returns the others, whose end has not been reported yet."""
        self._in_flight = None
        sequences = [sequence for request in self._requests.values() for sequence in request.sequences]
        self.scheduler.restart([sequence for sequence in sequences if sequence.finish_reason is None], failed_rows)
        return [sequence for sequence in sequences if sequence.finish_reason is not None]

    # ---- the rest

    def update_params(self, params: Params) -> None:
        """Replaces the parameters between two steps, and drops the prefix cache, which came from the old ones."""
        self.runner.set_params(params)
        self.scheduler.pool.forget_keys()

    def wait_compiled(self, tick: Callable[[], None] = lambda: None, *, first: bool = False) -> None:
        """Blocks until all executables (or `first`: enough to serve) are compiled."""
        if first:
            self.runner.wait_first(tick=tick)
        else:
            self.runner.wait_all()

    def stats(self) -> EngineStats:
        return read_stats(self.scheduler, self.runner.compile_plan, self._peak_blocks, self._steps)

    def close(self) -> None:
        """Stops compiling and frees the device's memory."""
        self.runner.close()
        self._dead = self._dead or RuntimeError("it was closed")
