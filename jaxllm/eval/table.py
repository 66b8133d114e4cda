"""An evaluation for people."""

from collections.abc import Iterator

from jaxllm.eval.results import Divergence, Evaluation, ModelScores


def table(evaluation: Evaluation) -> str:
    """A line a measure, with a column for the model and one for the reference."""
    models = [evaluation.model, *filter(None, [evaluation.reference])]
    rows: list[tuple[str, ...]] = [("", "model", "reference")] if len(models) > 1 else []
    rows += _of_models(models)
    if evaluation.divergence is not None:
        rows += _of_divergence(evaluation.divergence)
    widths = [max(map(len, column)) for column in zip(*(row[:2] for row in rows), strict=True)]
    lines = ("  ".join(f"{cell:<{width}}" for cell, width in zip(row, [*widths, 0], strict=False)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def _of_models(models: list[ModelScores]) -> Iterator[tuple[str, ...]]:
    texts = [each.text for each in models if each.text is not None]
    if texts:
        yield "tokens scored", *(f"{text.num_tokens}" for text in texts)
        yield "perplexity", *(f"{text.perplexity:.4f} ± {text.perplexity_error:.4f}" for text in texts)
    choices = [each.choices for each in models if each.choices is not None]
    if choices:
        yield "questions", *(f"{len(each.questions)}" for each in choices)
        yield "accuracy", *(f"{each.accuracy:.4f} ± {each.accuracy_error:.4f}" for each in choices)
        yield "accuracy by length", *(f"{each.accuracy_normalized:.4f}" for each in choices)


def _of_divergence(found: Divergence) -> Iterator[tuple[str, str]]:
    yield "ln(perplexity ratio)", f"{found.log_perplexity_ratio:+.5f}"
    yield "KL divergence, mean", f"{found.kld_mean:.6f}"
    for name, value in (
        ("median", found.kld_median),
        ("99 %", found.kld_99),
        ("99.9 %", found.kld_999),
        ("max", found.kld_max),
    ):
        yield f"  {name}", f"{value:.6f}"
    yield "same most likely", f"{100 * found.same_top:.2f} %"
    yield "change of p, mean", f"{100 * found.dp_mean:+.3f} %"
    yield "  RMS", f"{100 * found.dp_rms:.3f} %"
