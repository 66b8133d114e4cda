"""The engine's loop: schedule, run, commit. Single-threaded; `LLM` and `AsyncLLM` drive it."""

import dataclasses
import itertools
import logging
import random
from collections.abc import Callable, Sequence
from typing import Any

from jaxllm.engine.beam import group as beam_round
from jaxllm.engine.config import EngineConfig
from jaxllm.engine.device.candidates import BeamRow, read_candidates
from jaxllm.engine.device.logprobs import compact
from jaxllm.engine.device.packing import NUM_STOP_IDS
from jaxllm.engine.device.runner import Handle, Result, Runner
from jaxllm.engine.intake import bad_word_ids, check_params, check_prompt, check_room
from jaxllm.engine.output import Group
from jaxllm.engine.schedule.block_pool import BlockPool
from jaxllm.engine.schedule.plan import Plan
from jaxllm.engine.schedule.scheduler import Scheduler
from jaxllm.engine.schedule.sequence import Request, SequenceGroup
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

    def __init__(self, runner: Runner, *, vocab: int, eos_ids: Sequence[int], tokenizer: Any = None):
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
        self._groups: dict[str, Group] = {}
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
        prompt_token_ids: Sequence[int],
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
        if request_id in self._groups:
            raise ValueError(f"request id {request_id!r} is in use; choose another")
        prompt_token_ids = self.validate(prompt_token_ids, params)
        grammar = grammar or self.compile_grammar(params)
        group = Group(
            request_id=request_id,
            prompt=prompt,
            prompt_token_ids=prompt_token_ids,
            params=params,
            tokenizer=self.tokenizer,
            stream=stream,
        )
        siblings = self._siblings(group, priority, grammar)
        self._groups[request_id] = group
        self.scheduler.add(siblings)

    def compile_grammar(self, params: SamplingParams) -> Grammar | None:
        """The grammar of `structured_outputs`, if there is one: in any thread, as it may take seconds. ValueError for
        one that can't be used."""
        return None if params.structured_outputs is None else self._grammars.compile(params.structured_outputs)

    def warm_up_grammars(self) -> None:
        """Prepares for the first grammar, in any thread. With a large vocabulary this holds the interpreter's lock for
        a second, so that it had better be done before anyone waits for a step. ValueError if there can be none."""
        self._grammars.warm_up()

    def _siblings(self, group: Group, priority: int, grammar: Grammar | None) -> SequenceGroup:
        """The sequences of a request, of which `group` gets those whose ends it tells."""
        params = group.params
        seed = params.seed if params.seed is not None else self._rng.getrandbits(64)
        bad_words = bad_word_ids(params, self.tokenizer)
        sequences = [
            self._sequence(group, index, seed, priority, bad_words, grammar)
            for index in range(params.beam_width or params.num_samples)
        ]
        if params.beam_width is not None:
            group.samples = sequences[:1]
            return beam_round.start(sequences, self._text_to_watch(group))
        group.samples = list(sequences)
        siblings = SequenceGroup(sequences)
        for sequence in sequences:
            sequence.group = siblings
        return siblings

    def _text_to_watch(self, group: Group) -> Detokenizer | None:
        """What finds the stop strings of beams."""
        if not group.params.stops:
            return None
        try:
            return Detokenizer(self.tokenizer, group.params, group.prompt_token_ids)
        except Exception as error:  # noqa: BLE001 - a tokenizer may raise anything
            raise ValueError(f"stop strings can't be found, as the tokenizer fails on the prompt: {error}") from error

    def validate(self, prompt_token_ids: Sequence[Any], params: SamplingParams) -> list[int]:
        """The prompt as a list, if this engine can serve it with `params`; ValueError otherwise."""
        ids = check_prompt(prompt_token_ids, self.vocab, self.config.max_model_len)
        check_params(params, self.vocab, self.tokenizer)
        check_room(ids, params, self.config)
        return ids

    def _sequence(
        self, group: Group, index: int, seed: int, priority: int, bad_words: list[list[int]], grammar: Grammar | None
    ) -> Request:
        params, prompt = group.params, group.prompt_token_ids
        eos_ids = frozenset() if params.ignore_eos else self.eos_ids
        limit = self.config.max_model_len
        if params.max_tokens is not None:
            limit = min(limit, len(prompt) + params.max_tokens)
        return Request(
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
            owner=group,
            host_dependent=params.beam_width is not None or grammar is not None,
            matcher=None if grammar is None else grammar.matcher(),
        )

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a request at any time and frees its blocks; None if there is no such request (any more)."""
        if self._interrupted:
            self._start_over([])
        group = self._groups.pop(request_id, None)
        if group is None:
            return None
        for sample in group.samples:
            self.scheduler.finish(sample, "abort")
        return self._guarded(group, group.output) or group.output()

    def has_work(self) -> bool:
        """Whether something is in flight, or a request's end has not been returned yet."""
        return self._in_flight is not None or bool(self._groups)

    # ---- the loop

    def step(self) -> list[RequestOutput]:
        """Dispatches one step, then commits the one before it. Returns the requests that have news: all that
        finished, and those that stream. An exception other than the device's leaves the engine usable."""
        if self._dead is not None:
            raise EngineDeadError(f"the engine is dead: {self._dead}") from self._dead
        if self._interrupted:  # by the first call, or by Ctrl-C in the middle of the last one
            over = self._rebuild([])
            if over:
                self._interrupted = False
                return self._news(over)
        self._interrupted = True
        news = self._step()
        self._interrupted = False
        return news

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
        over: list[Request] = []
        if plan is not None:
            self._steps.count(plan.num_tokens)
            for chunk in plan.chunks:
                chunk.request.owner.scheduled()
            self._peak_blocks = max(self._peak_blocks, scheduler.pool.num_used)
            stuck = self._fill_masks(plan) if needs[1] else []
            try:
                self._in_flight = self.runner.dispatch(plan)
            except Exception as error:  # noqa: BLE001 - whatever it was, the donated state is gone
                failed = plan, error
            over = [self._end_stuck(request) for request in stuck]
        updated: list[Request] = []
        if done is not None:
            try:
                result = self.runner.collect(done)
            except Exception as error:  # noqa: BLE001 - raised on the device; the step after it has no state either
                failed = done.plan, error
            else:
                updated = scheduler.commit(done.plan, result.tokens, *self._read(done.plan, result))
        if failed is not None:
            updated += self._recover(*failed)
        return self._news(updated + over)

    def _fill_masks(self, plan: Plan) -> list[Request]:
        """Gives the plan's samples the masks of their grammars; returns those that can't go on."""
        bound = [(request, row) for row, request in enumerate(plan.samples) if request.matcher is not None]
        if not bound:
            return []
        plan.masks = self.runner.empty_masks(plan)
        for request, _ in bound:
            request.matcher.follow(request.output_token_ids)
        self._grammars.fill([(request.matcher, row) for request, row in bound], plan.masks)
        allowed = plan.masks.any(axis=1)  # a beam without a token just ends, if others go on
        return [r for r, row in bound if r.matcher.error or not (allowed[row] or r.group.is_search)]

    def _end_stuck(self, request: Request) -> Request:
        """Ends a request whose grammar allows no token; returns it, or who stands for it."""
        matcher, request = request.matcher, request.group.members[0] if request.group.is_search else request
        is_whole = matcher.error is None and matcher.may_end
        if not is_whole:
            request.error = matcher.error or "no token of the model's is allowed by its grammar"
        self.scheduler.finish(request, "stop" if is_whole else "error")
        return request

    def _read(self, plan: Plan, result: Result) -> tuple[list[Any] | None, list[Any] | None]:
        """Gives requests the log-probabilities of their prompts; returns what is to be kept of each sample's token,
        and how each beam may go on."""
        for span, rows in result.scores:
            request = span.request
            if request.epoch == span.epoch:
                kept = [compact(row, request.params.prompt_logprobs) for row in rows]
                request.prompt_logprobs[span.start - 1 :] = kept
        if result.logprobs is None:
            return None, None
        logprobs = [
            compact(row, request.params.num_top_logprobs, request.params.logprob_token_ids or ())
            if request.params.tracks_logprobs
            else None
            for request, row in zip(plan.samples, result.logprobs, strict=False)
        ]
        if result.candidates is None:
            return logprobs, None
        return logprobs, [
            BeamRow(read_candidates(row, request.group.round.search.num_candidates), kept)
            if request.group.is_search
            else None
            for request, row, kept in zip(plan.samples, result.candidates, logprobs, strict=False)
        ]

    def _news(self, updated: Sequence[Request]) -> list[RequestOutput]:
        changed: dict[str, Group] = {}
        for sample in updated:
            group = sample.owner
            if group.watches_text:
                self._guarded(group, lambda: self._watch_text(group, sample))  # noqa: B023 - called at once
            if group.stream or sample.finish_reason:
                changed[group.request_id] = group
        news = []
        for request_id, group in changed.items():
            if group.finished:
                self._groups.pop(request_id, None)
            if group.has_news:
                news.append(self._guarded(group, group.output) or group.output())
        return news

    def _watch_text(self, group: Group, sample: Request) -> None:
        stop = group.decode(sample)
        if stop is not None:
            self.scheduler.finish(sample, "stop")
            sample.finish_reason, sample.stop_reason = "stop", stop  # also if its length ended it just now

    def _guarded(self, group: Group, work: Callable[[], Any]) -> Any:
        """Does one request's own work; if that fails, the request ends, and its neighbours go on."""
        try:
            return work()
        except Exception as error:  # noqa: BLE001 - a tokenizer may raise anything
            log.exception("request %s failed on the host", group.request_id)
            group.fail(f"decoding its text failed: {error}")
            for sample in group.samples:
                self.scheduler.finish(sample, "error")
            for sample in group.shown:
                sample.finish_reason = "error"

    # ---- failure

    def _recover(self, plan: Plan, error: Exception) -> list[Request]:
        log.error("a step of %d tokens failed and is recomputed: %s", plan.num_tokens, error)
        return self._rebuild(plan.rows)

    def _rebuild(self, blamed: Sequence[Request]) -> list[Request]:
        """A new device state; see `_start_over`."""
        over = self._start_over(blamed)
        try:
            self.runner.wait_first()
            self.runner.reset()
        except Exception as error:
            self._dead = error
            raise EngineDeadError(f"the device state could not be built: {error}") from error
        return over

    def _start_over(self, blamed: Sequence[Request]) -> list[Request]:
        """All unfinished requests start over. Returns the others, whose end has not been reported yet."""
        self._in_flight = None
        samples = [sample for group in self._groups.values() for sample in group.samples]
        self.scheduler.restart([sample for sample in samples if sample.finish_reason is None], blamed)
        return [sample for sample in samples if sample.finish_reason is not None]

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
