"""`evaluate`: what a model makes of texts and questions, beside what a reference makes of them."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float32
from tqdm import tqdm

from jaxllm.engine.build import choose_mesh
from jaxllm.engine.model_source import ModelSource, Reading, model_source
from jaxllm.eval import CONTEXT
from jaxllm.eval.inputs import EncodedChoice, Question, TextChunk, check_same_tokens, chunks_of, encode_choices
from jaxllm.eval.results import ChoiceScores, Divergence, Evaluation, ModelScores, QuestionScores, TextScores
from jaxllm.eval.scorer import Comparison, Scorer
from jaxllm.progress import disabled
from jaxllm.sharding.mesh import platform_of

_LEAST_WIDTH = 16  # tokens of a row of choices


def evaluate(
    model: Any,
    *,
    texts: Sequence[str] = (),
    questions: Sequence[Question] = (),
    reference: Any = None,
    context: int = CONTEXT,
    tokenizer: Any = None,
    dtype: str = "auto",
    quantization: str | None = None,
    kv_cache_dtype: str = "auto",
    calculate_kv_scales: bool = False,
    mesh: str | Mesh | None = None,
    tensor_parallel_size: int | None = None,
) -> Evaluation:
    """Perplexity of `texts`, accuracy of `questions`, and the divergence from `reference` over the texts.

    `model` and `reference` are as for `LLM`, but local paths where they are names; `tokenizer` stands for that of both,
    `dtype`, `mesh` and `tensor_parallel_size` are those of both, `quantization` the model's, as are `kv_cache_dtype`
    and `calculate_kv_scales`: attention reads keys and values as a cache in 8 bits would give them back. Texts are read
    teacher-forced, in chunks of `context` tokens that don't overlap, of each of which the second half is scored.
    Log-probabilities are float32.

    Of the two models one at a time has its layers on the devices. What is kept of the reference is its head, and on the
    host the hidden state of each token that is scored: 8 KB of a model of 7B in bfloat16, where its log-probabilities
    would be 512 KB. `ValueError` where there is nothing to score, or the two models don't share their tokens.
    """
    mesh = choose_mesh(mesh, tensor_parallel_size)
    reading = Reading(quantization=quantization, rounds_rows=True)
    source = model_source(model, dtype, platform_of(mesh), tokenizer, reading).in_panels(mesh)
    inputs = _Inputs.of(texts, questions, source, context)
    make = partial(Scorer, source, mesh, kv_cache_dtype=kv_cache_dtype, calculate_kv_scales=calculate_kv_scales)
    if reference is None:
        scorer = make()
        logprobs = [scorer.logprobs(chunk.row, chunk.first)[0] for chunk in _bar(inputs.chunks, "model")]
        scores = ModelScores(text=_text_scores(inputs, logprobs), choices=_ask(scorer, inputs))
        return Evaluation(context=context, model=scores, reference=None, divergence=None)
    other = model_source(reference, dtype, platform_of(mesh), tokenizer)
    _check_pair(source, other, [*texts, *(q.context + choice for q in questions for choice in q.choices)])
    scorer = Scorer(other, mesh)
    hidden = [np.asarray(scorer.hidden(chunk.row, chunk.first)) for chunk in _bar(inputs.chunks, "reference")]
    their_choices, head = _ask(scorer, inputs), scorer.head
    del scorer  # its layers make room for the model's
    scorer = make()
    bar = _bar(inputs.chunks, "model")
    found = [scorer.compare(chunk.row, chunk.first, head, each) for chunk, each in zip(bar, hidden, strict=True)]
    ours, theirs, kld, same_top = ([getattr(each, name) for each in found] for name in Comparison._fields)
    return Evaluation(
        context=context,
        model=ModelScores(text=_text_scores(inputs, ours), choices=_ask(scorer, inputs)),
        reference=ModelScores(text=_text_scores(inputs, theirs), choices=their_choices),
        divergence=Divergence.of(*(inputs.scored(each) for each in (ours, theirs, kld, same_top))) if texts else None,
    )


class _Inputs(NamedTuple):
    """What is asked of each model."""

    chunks: list[TextChunk]
    questions: Sequence[Question]
    choices: list[list[EncodedChoice]]  # of each question
    shape: tuple[int, int]  # of the rows of tokens that choices are read in

    @classmethod
    def of(cls, texts: Sequence[str], questions: Sequence[Question], source: ModelSource, context: int) -> "_Inputs":
        """In tokens of the model's."""
        if not texts and not questions:
            raise ValueError("there is nothing to evaluate; give texts, or questions with choices")
        tokenizer, max_len = source.tokenizer, source.cfg.max_len
        if tokenizer is None:
            raise ValueError("the model comes without a tokenizer; give one")
        if context > max_len:
            raise ValueError(
                f"context={context} is more than the {max_len} tokens that the model was made for; lower it"
            )
        chunks = [chunk for text in texts for chunk in chunks_of(text, tokenizer, context)]
        if texts and not chunks:
            raise ValueError(
                f"none of the texts has more than the {context // 2} tokens that precede the first one that is scored; "
                "give longer ones, or lower context"
            )
        choices = [encode_choices(question, tokenizer, max_len) for question in questions]
        longest = max((len(choice.token_ids) for each in choices for choice in each), default=0)
        width = min(1 << max(longest - 1, _LEAST_WIDTH - 1).bit_length(), max_len)
        return cls(chunks, questions, choices, (max(1, context // width), width))

    def scored(self, values: Sequence[np.ndarray]) -> np.ndarray:
        """Those of each chunk's values that are of tokens that are scored."""
        return np.concatenate([each[: chunk.num_scored] for each, chunk in zip(values, self.chunks, strict=True)])


def _text_scores(inputs: _Inputs, logprobs: Sequence[Float32[np.ndarray, " scored"]]) -> TextScores | None:
    return TextScores.of(_finite(inputs.scored(logprobs), "text")) if inputs.chunks else None


def _ask(scorer: Scorer, inputs: _Inputs) -> ChoiceScores | None:
    """The log-likelihoods of all choices."""
    if not inputs.questions:
        return None
    flat = [choice for each in inputs.choices for choice in each]
    num_rows, sums = inputs.shape[0], []
    for start in _bar(range(0, len(flat), num_rows), "choices"):
        rows = flat[start : start + num_rows]
        tokens = np.zeros(inputs.shape, np.int32)
        for row, choice in zip(tokens, rows, strict=False):
            row[: len(choice.token_ids)] = choice.token_ids
        logprobs = scorer.logprobs(tokens, 1)
        for row, choice in zip(logprobs, rows, strict=False):
            own = _finite(row[choice.start - 1 : len(choice.token_ids) - 1], "choices")
            sums.append(float(own.sum(dtype=np.float64)))
    left = iter(sums)
    scores = [QuestionScores.of(each, [next(left) for _ in each.choices]) for each in inputs.questions]
    return ChoiceScores.of(scores)


def _finite(logprobs: Float32[np.ndarray, " tokens"], of: str) -> Float32[np.ndarray, " tokens"]:
    if not np.isfinite(logprobs).all():
        raise ValueError(
            f"the model gives tokens of the {of} log-probabilities that are not finite: its weights may be damaged, or "
            "its dtype's range too small; compare with dtype='float32'"
        )
    return logprobs


def _check_pair(model: ModelSource, reference: ModelSource, texts: Sequence[str]) -> None:
    if model.cfg.vocab != reference.cfg.vocab:
        raise ValueError(
            f"the model has a vocabulary of {model.cfg.vocab} tokens and the reference one of {reference.cfg.vocab}, "
            "so that their distributions can't be compared; give a reference of the same family"
        )
    if model.tokenizer is not None and reference.tokenizer is not None:
        check_same_tokens(texts, model.tokenizer, reference.tokenizer)


def _bar(items: Sequence[Any], what: str) -> Iterable[Any]:
    return tqdm(items, desc=what, unit="chunk", disable=disabled(), leave=False)
