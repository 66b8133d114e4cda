"""What a model is for, by the name of its architecture, and what a classifier says of its labels.

The task is a field of a model's `Config`, which the engine reads:

- "generate": `logits(hidden, ctx)` scores the vocabulary.
- "embed": hidden states are all there is, pooled over each text as `cfg.pooling` says: "last", "mean" or "cls" (its
  first token).
- "classify": pooled hidden states `[rows, embed]` become float32 scores `[rows, labels]` by `head(pooled, ctx)`.
  `cfg.labels` are the labels' names, `cfg.problem_type` what `config.json` says they mean. A language model scores
  by two of its tokens, as rerankers do that answer "no" or "yes", where its architecture is overridden and the key
  `classifier_from_token` names them.

`cfg.causal` is False where a token sees those after it: the whole of a text must be in one step then, and what its
blocks hold depends on all of it.
"""

from typing import Any

from jaxllm.argument_checks import a_type

TASKS = ("generate", "embed", "classify")
PROBLEM_TYPES = ("regression", "single_label_classification", "multi_label_classification")
_ENDINGS = {
    "ForCausalLM": "generate",
    "ForSequenceClassification": "classify",
    "ForMaskedLM": "embed",  # its head is left out
    "Model": "embed",
}
_MOST_LABELS = 2**16


def task_of(architecture: str, hf: dict) -> str:
    """The task of a checked `config.json` of this architecture; decoders whose tokens see those after them embed."""
    task = next((task for ending, task in _ENDINGS.items() if architecture.endswith(ending)), "generate")
    return "embed" if task == "generate" and not is_causal(hf) else task


def is_causal(hf: dict) -> bool:
    """Whether tokens see no later ones, by the keys of a decoder's checked `config.json`."""
    return hf.get("is_causal") is not False and not hf.get("use_bidirectional_attention")


def task_fields(architecture: str, hf: dict, wanted: str | None = None) -> dict[str, Any]:
    """The fields of a `Config` that differ from those of a model that generates.

    `wanted` stands for the architecture's task: any model may embed. Raises `ValueError` for another task, and for
    labels that are none.
    """
    task = task_of(architecture, hf)
    if wanted not in (None, "embed", task):
        known = " or ".join(dict.fromkeys(repr(one) for one in (task, "embed")))
        raise ValueError(f"task={wanted!r} is not what {architecture} is for; it is for {known}")
    task = wanted or task
    if task == "generate":
        return {}
    if task == "embed":
        return {"task": task}
    problem = hf.get("problem_type")
    if problem not in (None, *PROBLEM_TYPES):
        raise ValueError(f"problem_type={problem!r:.100} is unknown; it is one of {list(PROBLEM_TYPES)}, or null")
    labels = _labels(hf) if hf.get("classifier_from_token") is None else ("LABEL_0",)
    return {"task": task, "labels": labels, "problem_type": problem}


def _labels(hf: dict) -> tuple[str, ...]:
    """The labels' names, two of them if the file doesn't say, as in transformers."""
    names, count = hf.get("id2label"), hf.get("num_labels")
    if names is None:
        count = 2 if count is None else count
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= _MOST_LABELS:
            raise ValueError(f"num_labels={count!r:.100} must be in [1, {_MOST_LABELS}]")
        return tuple(f"LABEL_{i}" for i in range(count))
    if not isinstance(names, dict) or not 1 <= len(names) <= _MOST_LABELS:
        what = f"{len(names)} labels" if isinstance(names, dict) else a_type(names)
        raise ValueError(f"id2label holds {what}; it must be an object with 1 to {_MOST_LABELS} labels")
    found = tuple(names.get(str(i)) for i in range(len(names)))
    if not all(isinstance(name, str) for name in found):
        raise ValueError(f"id2label={names!r:.100} must give each number from 0 to {len(names) - 1} a string")
    return found
