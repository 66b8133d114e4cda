"""What an evaluation says. Logarithms are natural, so that information is counted in nats."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float32

from jaxllm.eval.inputs import Question


@dataclass(frozen=True, kw_only=True)
class TextScores:
    """How well a model predicts the tokens of texts: `l[t] = -ln p(token t | the chunk's tokens before it)`."""

    num_tokens: int  # scored
    mean_nll: float  # mean of l, in nats
    perplexity: float  # exp(mean of l)
    perplexity_error: float  # standard error: perplexity * std(l) / sqrt(num_tokens), as if tokens were independent

    @classmethod
    def of(cls, logprobs: Float32[np.ndarray, " tokens"]) -> "TextScores":
        """Of the logarithm of each token's probability."""
        nll = -logprobs.astype(np.float64)
        mean = float(nll.mean())
        perplexity = math.exp(mean) if mean < 700 else math.inf
        error = perplexity * float(nll.std()) / math.sqrt(len(nll))
        return cls(num_tokens=len(nll), mean_nll=mean, perplexity=perplexity, perplexity_error=error)


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """How far a model's distributions q of the next token are from a reference's p, over the tokens that are scored.

    `kld[t] = sum over the vocabulary of p * (ln p - ln q)`, in nats. `dp[t] = q(token t) - p(token t)`, of the token
    that the text has. The measures, and their names, are those of llama.cpp's `llama-perplexity --kl-divergence`.
    """

    kld_mean: float
    kld_median: float
    kld_99: float  # the 99th percentile
    kld_999: float  # the 99.9th
    kld_max: float
    same_top: float  # share of tokens at which both have the same most likely one
    dp_mean: float  # mean of dp, from -1 to 1
    dp_rms: float  # sqrt(mean of dp²)
    log_perplexity_ratio: float  # ln(perplexity / the reference's)

    @classmethod
    def of(
        cls,
        logprobs: Float32[np.ndarray, " tokens"],
        reference: Float32[np.ndarray, " tokens"],
        kld: Float32[np.ndarray, " tokens"],
        same_top: Bool[np.ndarray, " tokens"],
    ) -> "Divergence":
        """Of both models' logarithms of each token's probability, and what was summed over the vocabulary."""
        ours, theirs, kld = (each.astype(np.float64) for each in (logprobs, reference, kld))
        change = np.exp(ours) - np.exp(theirs)
        return cls(
            kld_mean=float(kld.mean()),
            kld_median=float(np.median(kld)),
            kld_99=float(np.quantile(kld, 0.99)),
            kld_999=float(np.quantile(kld, 0.999)),
            kld_max=float(kld.max()),
            same_top=float(same_top.mean()),
            dp_mean=float(change.mean()),
            dp_rms=float(np.sqrt(np.square(change).mean())),
            log_perplexity_ratio=float((theirs - ours).mean()),
        )


@dataclass(frozen=True, kw_only=True)
class QuestionScores:
    """`log_likelihoods[i] = sum of ln p(token | those before it)` over the tokens of choice i."""

    log_likelihoods: tuple[float, ...]  # in nats
    answer: int  # the right choice
    chosen: int  # the most likely one
    chosen_normalized: int  # the one with the greatest log-likelihood a character

    @classmethod
    def of(cls, question: Question, log_likelihoods: Sequence[float]) -> "QuestionScores":
        each = [value / length for value, length in zip(log_likelihoods, question.lengths, strict=True)]
        chosen, normalized = (max(range(len(values)), key=values.__getitem__) for values in (log_likelihoods, each))
        return cls(
            log_likelihoods=tuple(log_likelihoods), answer=question.answer, chosen=chosen, chosen_normalized=normalized
        )


@dataclass(frozen=True, kw_only=True)
class ChoiceScores:
    """Shares of questions with the right choice, as lm-evaluation-harness's acc and acc_norm."""

    accuracy: float  # the most likely choice is right
    accuracy_normalized: float  # the one with the greatest log-likelihood a character is
    accuracy_error: float  # standard error of `accuracy`: sqrt(a * (1 - a) / questions)
    questions: tuple[QuestionScores, ...]

    @classmethod
    def of(cls, questions: Sequence[QuestionScores]) -> "ChoiceScores":
        right = sum(each.chosen == each.answer for each in questions) / len(questions)
        normalized = sum(each.chosen_normalized == each.answer for each in questions) / len(questions)
        return cls(
            accuracy=right,
            accuracy_normalized=normalized,
            accuracy_error=math.sqrt(right * (1 - right) / len(questions)),
            questions=tuple(questions),
        )


@dataclass(frozen=True, kw_only=True)
class ModelScores:
    """Of one model; None for what was not asked."""

    text: TextScores | None
    choices: ChoiceScores | None


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What `evaluate` finds; the reference's are None without one."""

    context: int  # tokens of a chunk
    model: ModelScores
    reference: ModelScores | None
    divergence: Divergence | None
