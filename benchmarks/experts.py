"""Decoding with a mixture of experts on a CPU, beside transformers and what memory allows. The model is a Mixtral of
random weights, 4 of 32 experts a token: 300 million parameters at 12 layers."""

import tempfile
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import numpy as np

from benchmarks.runs import table_lines

_EXPERTS, _TOP_K = 32, 4
_SIZES: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 480,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_local_experts": _EXPERTS,
    "num_experts_per_tok": _TOP_K,
    "max_position_embeddings": 2048,
    "initializer_range": 0.05,
}
_PROMPT = 8  # tokens
_READ_BYTES = 1 << 29  # by which the memory's bandwidth is measured
_COLUMNS = (
    ("tokens_per_s", "tokens/s", ".1f"),
    ("theirs_per_s", "transformers", ".1f"),
    ("ratio", "ratio", ".2f"),
    ("mb", "MB a step", ".0f"),
    ("of_floor", "x the floor", ".2f"),
)


def run(*, dtype: str, batches: Sequence[int], layers: int, output_len: int, repeats: int, seed: int) -> dict[str, Any]:
    """The report; medians of `repeats` runs, which take turns. Greedy; a run is a prompt of 8 tokens a row and then
    `output_len` steps."""
    import torch
    import transformers

    from jaxllm import LLM, SamplingParams

    torch.manual_seed(seed)
    config = transformers.MixtralConfig(num_hidden_layers=layers, **_SIZES)
    model: Any = transformers.MixtralForCausalLM(config).to(getattr(torch, dtype)).eval()
    model.generation_config.eos_token_id = None
    rng = np.random.default_rng(seed)
    prompts = {n: rng.integers(0, _SIZES["vocab_size"], (n, _PROMPT)) for n in batches}
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False)
    options = {"dtype": dtype, "max_num_seqs": max(batches), "max_num_batched_tokens": max(64, _PROMPT * max(batches))}
    options |= {"max_model_len": 512, "enable_prefix_caching": False}
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        with LLM(folder, skip_tokenizer_init=True, **options) as llm:
            llm.wait_compiled()

            def ours(batch: int) -> np.ndarray:
                rows = [{"prompt_token_ids": ids.tolist()} for ids in prompts[batch]]
                outputs = llm.generate(rows, params, use_tqdm=False)
                return np.array([output.outputs[0].token_ids for output in outputs])

            def theirs(batch: int) -> np.ndarray:
                ids = torch.tensor(prompts[batch])
                limits = {"min_new_tokens": output_len, "max_new_tokens": output_len, "pad_token_id": 0}
                with torch.inference_mode():
                    made = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **limits)
                return made[:, _PROMPT:].numpy()

            ways = {(name, n): (way, n) for n in batches for name, way in (("ours", ours), ("theirs", theirs))}
            made = {key: way(n) for key, (way, n) in ways.items()}
            seconds, bandwidths = _take_turns(ways, repeats)
    bandwidth = max(bandwidths)
    rows = []
    for n in batches:
        own, other = (median(seconds[name, n]) for name in ("ours", "theirs"))
        step_bytes = _bytes_of_step(model, prompts[n], made["theirs", n])
        rows.append(
            {
                "batch": n,
                "tokens_per_s": n * output_len / own,
                "theirs_per_s": n * output_len / other,
                "ratio": other / own,
                "mb": step_bytes / 1e6,
                "of_floor": own / output_len / (step_bytes / bandwidth),
                "equal_tokens": float((made["ours", n] == made["theirs", n]).mean()),
            }
        )
    size = sum(p.numel() for p in model.parameters())
    options = {"dtype": dtype, "parameters": size, "output_len": output_len, "repeats": repeats, "seed": seed}
    return {"benchmark": "experts", "options": options, "gb_per_s": bandwidth / 1e9, "results": rows}


def _take_turns(
    ways: dict[tuple[str, int], tuple[Callable[[int], Any], int]], repeats: int
) -> tuple[dict[tuple[str, int], list[float]], list[float]]:
    """Seconds of each way, and bytes that memory gave in a second between them."""
    import torch

    seconds: dict[tuple[str, int], list[float]] = {key: [] for key in ways}
    memory, bandwidths = torch.ones(_READ_BYTES // 4), []
    for _ in range(repeats):
        for key, (way, batch) in ways.items():
            start = time.perf_counter()
            way(batch)
            seconds[key].append(time.perf_counter() - start)
        start = time.perf_counter()
        memory.sum()
        bandwidths.append(_READ_BYTES / (time.perf_counter() - start))
    return seconds, bandwidths


def _bytes_of_step(model: Any, prompts: np.ndarray, made: np.ndarray) -> float:
    """That a decode step reads at least, in the mean: the weights but for the embedding, and of experts those that its
    tokens are sent to."""
    import torch

    ids = torch.tensor(np.concatenate([prompts, made], axis=1))
    with torch.inference_mode():
        logits = model(ids, output_router_logits=True).router_logits  # of each layer [rows * len, experts]
    experts = [p for name, p in model.named_parameters() if ".experts." in name]
    others = [p for name, p in model.named_parameters() if ".experts." not in name and "embed_tokens" not in name]
    touched = 0.0
    for layer in logits:
        chosen = layer.reshape(*ids.shape, _EXPERTS).topk(_TOP_K, dim=-1).indices[:, _PROMPT:]
        touched += float(np.mean([len(chosen[:, step].unique()) for step in range(chosen.shape[1])]))
    sizes = [sum(p.numel() * p.element_size() for p in each) for each in (others, experts)]
    return sizes[0] + sizes[1] * touched / (_EXPERTS * len(logits))


def table(report: dict[str, Any]) -> str:
    options = report["options"]
    equal = min(row["equal_tokens"] for row in report["results"])
    lines = [
        f"{options['parameters'] / 1e6:.0f} million parameters, {options['dtype']}, {options['output_len']} steps",
        *table_lines(report["results"], "batch", _COLUMNS, 14),
        f"medians of {options['repeats']} runs; at least {equal:.0%} of the tokens equal; the floor is at "
        f"{report['gb_per_s']:.1f} GB/s, the most that was measured between the runs",
    ]
    return "\n".join(lines)
