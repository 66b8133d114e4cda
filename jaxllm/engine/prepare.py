"""What a user asks, checked and resolved once, and the sequences that it becomes."""

import itertools
import logging
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from jaxllm.engine.beam.group import BeamSearchGroup
from jaxllm.engine.config import EngineConfig
from jaxllm.engine.device.state import NUM_STOP_IDS
from jaxllm.engine.intake import check_continuation, check_prompt, check_request
from jaxllm.engine.output import Request
from jaxllm.engine.pooling import Pooler, PoolingRequest
from jaxllm.engine.rollout_request import RolloutRequest
from jaxllm.engine.schedule import sequence as schedule
from jaxllm.engine.schedule.sequence_group import Samples, SequenceGroup
from jaxllm.engine.schedule.targets import Targets
from jaxllm.engine.scoring import LoglikelihoodRequest
from jaxllm.grammar.compiler import Grammar, GrammarCompiler
from jaxllm.pooling_params import PoolingParams
from jaxllm.sampling_params import MAX_STOP_TOKEN_IDS, SamplingParams
from jaxllm.structured_outputs import StructuredOutputs, as_structured_outputs
from jaxllm.text.detokenizer import Detokenizer

log = logging.getLogger(__name__)

_ROUTES = {"embed": "/v1/embeddings", "classify": "/classify"}


class PreparedRequest(NamedTuple):
    """A request that the engine can serve: nothing about it is looked at again."""

    token_ids: list[int]  # the prompt's
    prompt: str | None  # its text, if it is known
    params: SamplingParams
    bad_words: list[list[int]]  # as token ids
    grammar: Grammar | None
    text: Detokenizer | None  # what finds the stop strings of beams
    pooling: PoolingParams | None = None  # in the place of a text, which `params` are of
    continuations: list[list[int]] | None = None  # that are scored, likewise


class Intake:
    """Prepares requests for one model: from any thread. `vocab` counts its token ids, `eos_ids` end its texts;
    `tokenizer` is None for an engine of token ids only."""

    def __init__(self, config: EngineConfig, *, vocab: int, eos_ids: Iterable[int], tokenizer: Any, pooler: Pooler):
        self.config, self.vocab, self.eos_ids, self.tokenizer = config, vocab, frozenset(eos_ids), tokenizer
        self.pooler = pooler
        self.grammars = GrammarCompiler(tokenizer, vocab, self.eos_ids)
        self._rng = random.Random(config.seed)
        self._arrivals = itertools.count()
        if len(self.eos_ids) + MAX_STOP_TOKEN_IDS > NUM_STOP_IDS:
            most = NUM_STOP_IDS - MAX_STOP_TOKEN_IDS
            raise ValueError(f"the model has {len(self.eos_ids)} end-of-sequence ids; at most {most} are supported")

    def prepare(
        self, token_ids: Sequence[Any], params: SamplingParams, *, prompt: str | None = None
    ) -> PreparedRequest:
        """Checks a request and resolves what it names. ValueError if this engine can't serve it. Compiling a grammar
        may take seconds."""
        self._check_generates()
        params = params.snapshot()
        if params.logprobs_mode is None and params.beam_width is None and params.num_samples == params.n:
            params.logprobs_mode = self.config.logprobs_mode
        ids, bad_words = check_request(token_ids, params, self.config, self.vocab, self.tokenizer)
        wanted = as_structured_outputs(params.structured_outputs)  # which it is already
        grammar = None if wanted is None else self._compile(wanted)
        text = None
        if params.beam_width is not None and params.stops:
            text = self._watch_text(ids, params)
        return PreparedRequest(ids, prompt, params, bad_words, grammar, text)

    def prepare_pooling(
        self, token_ids: Sequence[Any], params: PoolingParams, *, prompt: str | None = None
    ) -> PreparedRequest:
        """Likewise, of a prompt that is pooled."""
        params = params.snapshot()
        self.pooler.check(params)
        keep = params.truncate_prompt_tokens
        ids = check_prompt(token_ids, self.vocab, self.config.max_model_len, keep, num_generated=0)
        plain = SamplingParams(
            max_tokens=1, cache_salt=params.cache_salt, skip_reading_prefix_cache=params.skip_reading_prefix_cache
        )
        return PreparedRequest(ids, prompt, plain, [], None, None, params)

    def prepare_scores(self, context: Sequence[Any], continuations: Sequence[Sequence[Any]]) -> PreparedRequest:
        """Likewise, of continuations of a context that are scored. All but a continuation's last token are computed."""
        self._check_generates()
        most = self.config.max_model_len
        ids = check_prompt(context, self.vocab, most, None, num_generated=0)
        scored = [check_continuation(each, len(ids), self.vocab, most) for each in continuations]
        if not scored:
            raise ValueError("there are no continuations to score; give at least one")
        return PreparedRequest(ids, None, SamplingParams(max_tokens=1), [], None, None, None, scored)

    def _check_generates(self) -> None:
        if not self.config.generates:
            raise ValueError(
                f"this model generates no text: it is made to {self.pooler.task}; call LLM.{self.pooler.task}, or POST "
                f"to {_ROUTES[self.pooler.task]}"
            )

    def _compile(self, wanted: StructuredOutputs) -> Grammar:
        try:
            return self.grammars.compile(wanted)
        except ValueError:
            raise
        except Exception as error:
            log.exception("compiling a grammar failed")
            raise ValueError(f"the grammar can't be compiled: {error}") from error

    def _watch_text(self, token_ids: list[int], params: SamplingParams) -> Detokenizer:
        try:
            return Detokenizer(self.tokenizer, params, token_ids)
        except Exception as error:  # noqa: BLE001 - a tokenizer may raise anything
            raise ValueError(f"stop strings can't be found, as the tokenizer fails on the prompt: {error}") from error

    def pooled_sequence(self, prepared: PreparedRequest, request: PoolingRequest, priority: int) -> SequenceGroup:
        """The sequence of `request`."""
        sequence = schedule.Sequence(
            prompt_token_ids=prepared.token_ids,
            params=prepared.params,
            arrival=next(self._arrivals),
            seed=0,
            max_total_len=len(prepared.token_ids) + 1,  # it has computed all, and its output is still to come
            priority=priority,
            reports_tokens=False,
            pooling=self.pooler.pooling,
        )
        sequence.request = request
        return Samples([sequence])

    def scored_sequences(
        self, prepared: PreparedRequest, request: LoglikelihoodRequest, priority: int
    ) -> SequenceGroup:
        """Those of `request`, one for each continuation: they share the context as samples share a prompt, and all
        their tokens are known."""
        return Samples([self._scored(prepared, request, each, priority) for each in prepared.continuations or ()])

    def _scored(
        self, prepared: PreparedRequest, request: LoglikelihoodRequest, continuation: list[int], priority: int
    ) -> schedule.Sequence:
        sequence = schedule.Sequence(
            prompt_token_ids=prepared.token_ids,
            params=prepared.params,
            arrival=next(self._arrivals),
            seed=0,
            max_total_len=len(prepared.token_ids) + len(continuation),  # which it never has: the last is not computed
            priority=priority,
            reports_tokens=False,
            targets=Targets(continuation),
            own_token_ids=continuation[:-1],
        )
        sequence.request = request
        return sequence

    def sequences(self, prepared: PreparedRequest, request: Request | RolloutRequest, priority: int) -> SequenceGroup:
        """The samples or beams of `request`, which are told to the scheduler together."""
        params = prepared.params
        seed = params.seed if params.seed is not None else self._rng.getrandbits(64)
        sequences = list(self._sequences(prepared, request, seed, priority))
        if params.beam_width is not None:
            return BeamSearchGroup(sequences, prepared.text)
        return Samples(sequences)

    def _sequences(
        self, prepared: PreparedRequest, request: Request | RolloutRequest, seed: int, priority: int
    ) -> Iterator[schedule.Sequence]:
        params, grammar = prepared.params, prepared.grammar
        eos_ids = frozenset() if params.ignore_eos else self.eos_ids
        limit = self.config.max_model_len
        if params.max_tokens is not None:
            limit = min(limit, len(prepared.token_ids) + params.max_tokens)
        stop_ids = eos_ids.union(params.stop_token_ids or ())
        reports_tokens, is_bare, first = (
            request.stream or request.watches_text,
            isinstance(request, RolloutRequest),
            None,
        )
        for index in range(params.beam_width or params.num_samples):
            sequence = schedule.Sequence(
                prompt_token_ids=prepared.token_ids,
                params=params,
                arrival=next(self._arrivals),
                seed=seed,
                sample_index=index,
                max_total_len=limit,
                stop_ids=stop_ids,
                eos_ids=eos_ids,
                priority=priority,
                bad_words=prepared.bad_words,
                reports_tokens=reports_tokens,
                bare_logprobs=is_bare,
                matcher=None if grammar is None else grammar.matcher(),
                like=first,
            )
            sequence.request = request
            first = first or sequence
            yield sequence
