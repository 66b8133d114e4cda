"""What is asked of an `LLM` about texts that are there already: how likely it finds them."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from jaxllm.argument_checks import check_int
from jaxllm.engine.prepare import PreparedRequest
from jaxllm.errors import EngineAsleepError
from jaxllm.llm_control import LLMControl
from jaxllm.progress import progress_bar
from jaxllm.score_outputs import ContinuationScore, DocumentScore, LoglikelihoodOutput
from jaxllm.text.continuations import encode_continuations, encode_text, prefix_token, windows_of


class LLMScores(LLMControl):
    """An engine that tells log-probabilities of given tokens."""

    def _run(self, requests: list[tuple[PreparedRequest, int]], **options: Any) -> Iterator[tuple[int, Any]]:
        """Runs requests, each with its priority, with the options of `Engine.submit`; yields outputs with the index of
        theirs."""
        raise NotImplementedError

    def loglikelihood(
        self, contexts: Sequence[Any], *, use_tqdm: bool | Callable[..., Any] = True
    ) -> list[list[ContinuationScore]]:
        """How likely each continuation is after its context: of each `(context, [continuation, ...])` a list with one
        result a continuation, in the order given.

            ((paris, berlin),) = llm.loglikelihood([("The capital of France is", [" Paris", " Berlin"])])
            paris.logprob > berlin.logprob  # nats; also token_logprobs, float32 [tokens], and is_greedy

        A context and its continuations are strings, or lists or arrays of token ids; continuations of one length may be
        an array `[n, length]`. Strings are tokenised together, as
        lm-evaluation-harness does: spaces at the end of the context count as the continuation's. Nothing is generated;
        a context is computed once for all its continuations, and not at all where the prefix cache has it. Both
        together may have one token more than `max_model_len`.

        Raises `ValueError` before anything runs, and `EngineError` if a context fails on the device.
        """
        if isinstance(contexts, str | tuple) or not isinstance(contexts, Sequence):
            raise ValueError("contexts must be a list of pairs: (context, [continuation, ...])")
        requests = [self._score_request(i, each) for i, each in enumerate(contexts)]
        return self._scores(requests, use_tqdm)

    def perplexity(
        self,
        documents: Any,
        *,
        stride: int | None = None,
        max_len: int | None = None,
        prefix_token_id: int | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
    ) -> list[DocumentScore]:
        """How well the model predicts documents of any length: strings, lists or arrays of token ids, or one of them.

        The first token is given `prefix_token_id` (None: the tokenizer's beginning of sequence, or else its end of
        one). A longer document than `max_len` (None: `max_model_len`) is read in windows of so many tokens, each of
        which scores the next `stride` (None: `max_len`, so that windows don't overlap): every token is scored once,
        with at least `max_len - stride` tokens before it where there are as many. With the defaults, `logprob` is
        lm-evaluation-harness's `loglikelihood_rolling`. Errors are as of `loglikelihood`.
        """
        most = self.engine.config.max_model_len
        max_len = most if max_len is None else max_len
        check_int("max_len", max_len, 1, most)
        stride = max_len if stride is None else stride
        check_int("stride", stride, 1, max_len)
        texts = _each_document(documents)
        prefix = prefix_token_id
        if prefix is None and texts:
            if self.tokenizer is None:
                raise ValueError("there is no tokenizer that names the token before a text; give prefix_token_id")
            prefix = prefix_token(self.tokenizer)
        encoded = [self._document_ids(i, text) for i, text in enumerate(texts)]
        windows = [list(windows_of(ids, prefix or 0, max_len, stride)) for ids in encoded]
        requests = [self.engine.prepare_scores(each.context, [each.token_ids]) for of_one in windows for each in of_one]
        scores = iter(self._scores(requests, use_tqdm))
        found = []
        for ids, of_one in zip(encoded, windows, strict=True):
            parts = [score.token_logprobs for _ in of_one for score in next(scores)]
            found.append(DocumentScore(token_ids=ids, token_logprobs=np.concatenate(parts)))
        return found

    def _document_ids(self, index: int, document: Any) -> list[int]:
        ids: Any = document
        if isinstance(document, str):
            if self.tokenizer is None:
                raise ValueError("texts need a tokenizer; pass tokenizer=..., or token ids")
            ids = encode_text(document, self.tokenizer)
        ids = ids.tolist() if hasattr(ids, "ndim") else list(ids)
        if not ids:
            raise ValueError(f"document {index} has no tokens; leave it out")
        return ids

    def _score_request(self, index: int, context: Any) -> PreparedRequest:
        try:
            text, continuations = context
        except (TypeError, ValueError):
            raise ValueError(f"contexts[{index}] is no pair of a context and a list of continuations") from None
        try:
            return self.engine.prepare_scores(*encode_continuations(text, continuations, self.tokenizer))
        except EngineAsleepError:
            raise
        except ValueError as error:
            raise ValueError(f"contexts[{index}]: {error}") from error

    def _scores(
        self, requests: list[PreparedRequest], use_tqdm: bool | Callable[..., Any]
    ) -> list[list[ContinuationScore]]:
        found: dict[int, LoglikelihoodOutput] = {}
        with progress_bar(use_tqdm, len(requests), "scoring") as bar:
            for index, output in self._run([(request, 0) for request in requests]):
                found[index] = output
                bar.update()
        return [found[i].made for i in range(len(requests))]


def _each_document(documents: Any) -> list[Any]:
    """One document, or each of a list of them."""
    if isinstance(documents, str):
        return [documents]
    if not isinstance(documents, list | tuple) and getattr(documents, "ndim", 0) not in (1, 2):
        raise ValueError("documents must be strings, or lists or arrays of token ids, or one of them")
    is_one = len(documents) > 0 and not isinstance(documents[0], str | list | tuple) and not np.ndim(documents[0])
    return [documents] if is_one else list(documents)
