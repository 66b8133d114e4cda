"""Embeddings of texts of mixed length on a CPU, beside transformers: in the order in which they come, and sorted by
length, which saves it most of the padding. The model is a BERT of random weights, as large as bge-small."""

import random
import tempfile
import time
from collections.abc import Callable, Sequence
from statistics import median_low
from typing import Any

import numpy as np

from benchmarks.runs import table_lines

_SIZES: dict[str, Any] = {
    "vocab_size": 30522,
    "hidden_size": 384,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
    "max_position_embeddings": 512,
}
_COLUMNS = (("texts_per_s", "texts/s", ".1f"), ("ratio", "of ours", ".2f"))
_BATCH = 32  # texts of one call of transformers


def run(*, texts: int, repeats: int, seed: int) -> dict[str, Any]:
    """The report; medians of `repeats` runs, which take turns. Lengths are log-normal, 40 tokens in the median."""
    import torch
    import transformers

    from jaxllm import LLM

    rng = random.Random(seed)
    lens = [min(400, max(3, int(rng.lognormvariate(3.7, 0.9)))) for _ in range(texts)]
    prompts = [[rng.randrange(1000, _SIZES["vocab_size"]) for _ in range(n)] for n in lens]
    torch.manual_seed(seed)
    model: Any = transformers.BertModel(transformers.BertConfig(**_SIZES), add_pooling_layer=False).eval()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        with LLM(folder, skip_tokenizer_init=True) as llm:
            llm.wait_compiled()

            def ours() -> np.ndarray:
                outputs = llm.embed([{"prompt_token_ids": ids} for ids in prompts], use_tqdm=False)
                return np.stack([output.made.data for output in outputs])

            ways: dict[str, Callable[[], np.ndarray]] = {
                "ours": ours,
                "transformers": lambda: _theirs(model, prompts, range(texts)),
                "transformers, sorted": lambda: _theirs(model, prompts, sorted(range(texts), key=lens.__getitem__)),
            }
            error = float(np.abs(ours() - ways["transformers"]()).max())
            seconds: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(repeats):
                for name, way in ways.items():
                    start = time.perf_counter()
                    way()
                    seconds[name].append(time.perf_counter() - start)
    speeds = {name: texts / median_low(each) for name, each in seconds.items()}
    rows = [{"engine": n, "texts_per_s": speed, "ratio": speed / speeds["ours"]} for n, speed in speeds.items()]
    options = {"texts": texts, "tokens": sum(lens), "longest": max(lens), "repeats": repeats, "seed": seed}
    return {"benchmark": "embeddings", "options": options, "largest_difference": error, "results": rows}


def _theirs(model: Any, prompts: Sequence[list[int]], order: Sequence[int]) -> np.ndarray:
    """Means of the last hidden states, of length 1, in batches of padded prompts."""
    import torch

    vectors: list[Any] = [None] * len(prompts)
    with torch.inference_mode():
        for at in range(0, len(order), _BATCH):
            indices = order[at : at + _BATCH]
            longest = max(len(prompts[i]) for i in indices)
            ids = torch.tensor([prompts[i] + [0] * (longest - len(prompts[i])) for i in indices])
            mask = torch.tensor([[1] * len(prompts[i]) + [0] * (longest - len(prompts[i])) for i in indices])
            hidden, weights = model(ids, attention_mask=mask).last_hidden_state, mask.unsqueeze(-1).float()
            pooled = torch.nn.functional.normalize((hidden * weights).sum(1) / weights.sum(1), dim=-1)
            for i, vector in zip(indices, pooled, strict=True):
                vectors[i] = vector.numpy()
    return np.stack(vectors)


def table(report: dict[str, Any]) -> str:
    options = report["options"]
    lines = [
        f"{options['texts']} texts of {options['tokens']} tokens, at most {options['longest']}",
        *table_lines(report["results"], "engine", _COLUMNS, 21),
        f"medians of {options['repeats']} runs; vectors differ by {report['largest_difference']:.1g} at most",
    ]
    return "\n".join(lines)
