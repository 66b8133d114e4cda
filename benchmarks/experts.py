"""Decoding with a mixture of experts on a CPU, beside transformers, vLLM if there is one, and what memory allows. The
model is a Mixtral of random weights, 4 of 32 experts a token: 300 million parameters at 12 layers."""

import contextlib
import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.runs import table_lines

Way = Callable[[np.ndarray], np.ndarray]  # tokens [rows, output_len] that follow prompts [rows, len]

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
_REST_S = 0.3  # between two runs: what threads of others spin
_COLUMNS = (("mb", "MB a step", ".0f"), ("of_floor", "x the floor", ".2f"))


def run(
    *, dtype: str, batches: Sequence[int], layers: int, output_len: int, repeats: int, seed: int, vllm: str | None
) -> dict[str, Any]:
    """The report; medians of `repeats` runs, which take turns. Greedy; a run is a prompt of 8 tokens a row and then
    `output_len` steps. `vllm`: the Python of an environment that has it."""
    import torch
    import transformers

    torch.manual_seed(seed)
    config = transformers.MixtralConfig(num_hidden_layers=layers, **_SIZES)
    model: Any = transformers.MixtralForCausalLM(config).to(getattr(torch, dtype)).eval()
    model.generation_config.eos_token_id = None
    rng = np.random.default_rng(seed)
    prompts = {n: rng.integers(0, _SIZES["vocab_size"], (n, _PROMPT)) for n in batches}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        model.save_pretrained(folder)
        ways = {"ours": stack.enter_context(_ours(folder, dtype, batches, output_len))}
        ways["transformers"] = _transformers(model, output_len)
        if vllm is not None:
            ways["vllm"] = stack.enter_context(_vllm(vllm, folder, dtype, output_len))
        made = {(name, n): way(prompts[n]) for name, way in ways.items() for n in batches}
        seconds, bandwidth = _take_turns(ways, prompts, repeats)
    rows = []
    for n in batches:
        speeds = {name: n * output_len / median(seconds[name, n]) for name in ways}
        step_bytes = _bytes_of_step(model, prompts[n], made["transformers", n])
        row = {"batch": n, "tokens_per_s": speeds, "mb": step_bytes / 1e6}
        row["of_floor"] = n / speeds["ours"] / (step_bytes / bandwidth)
        row["equal_tokens"] = float((made["ours", n] == made["transformers", n]).mean())
        rows.append(row)
    size = sum(p.numel() for p in model.parameters())
    options = {"dtype": dtype, "parameters": size, "output_len": output_len, "repeats": repeats, "seed": seed}
    return {"benchmark": "experts", "options": options, "gb_per_s": bandwidth / 1e9, "results": rows}


@contextlib.contextmanager
def _ours(folder: str, dtype: str, batches: Sequence[int], output_len: int) -> Iterator[Way]:
    from jaxllm import LLM, SamplingParams

    options: dict[str, Any] = {"max_num_seqs": max(batches), "max_num_batched_tokens": max(64, _PROMPT * max(batches))}
    options |= {"max_model_len": 512, "enable_prefix_caching": False, "skip_tokenizer_init": True}
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False)
    with LLM(folder, dtype=dtype, **options) as llm:
        llm.wait_compiled()

        def generate(prompts: np.ndarray) -> np.ndarray:
            outputs = llm.generate([{"prompt_token_ids": ids.tolist()} for ids in prompts], params, use_tqdm=False)
            return np.array([output.outputs[0].token_ids for output in outputs])

        yield generate


def _transformers(model: Any, output_len: int) -> Way:
    import torch

    limits = {"min_new_tokens": output_len, "max_new_tokens": output_len, "pad_token_id": 0}

    def generate(prompts: np.ndarray) -> np.ndarray:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            made = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **limits)
        return made[:, _PROMPT:].numpy()

    return generate


@contextlib.contextmanager
def _vllm(python: str, folder: str, dtype: str, output_len: int) -> Iterator[Way]:
    """In a process of its own, in its own environment."""
    command = [python, "-I", str(Path(__file__).with_name("vllm_peer.py")), folder, dtype]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as process:
        assert process.stdin is not None and process.stdout is not None
        asks, answers = process.stdin, process.stdout

        def generate(prompts: np.ndarray) -> np.ndarray:
            question = json.dumps({"prompts": prompts.tolist(), "output_len": output_len})
            with contextlib.suppress(BrokenPipeError):  # it has ended, and gives no answer
                asks.write(f"{question}\n".encode())
            if not (line := answers.readline()):
                raise ValueError(f"vLLM in {python} ended: what it wrote is above; take an environment that has it")
            return np.array(json.loads(line))

        yield generate
        asks.close()


def _take_turns(
    ways: Mapping[str, Way], prompts: Mapping[int, np.ndarray], repeats: int
) -> tuple[dict[tuple[str, int], list[float]], float]:
    """Seconds of each way, and the most bytes that memory gave in a second between them."""
    import torch

    seconds: dict[tuple[str, int], list[float]] = {(name, n): [] for name in ways for n in prompts}
    memory, bandwidth = torch.ones(_READ_BYTES // 4), 0.0
    for _ in range(repeats):
        for name, n in seconds:
            time.sleep(_REST_S)
            start = time.perf_counter()
            ways[name](prompts[n])
            seconds[name, n].append(time.perf_counter() - start)
        start = time.perf_counter()
        memory.sum()
        bandwidth = max(bandwidth, _READ_BYTES / (time.perf_counter() - start))
    return seconds, bandwidth


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
    options, results = report["options"], report["results"]
    names = list(results[0]["tokens_per_s"])
    columns = [(name, name, ".1f") for name in names] + [(f"{name} x", f"x {name}", ".2f") for name in names[1:]]
    rows = []
    for row in results:
        speeds = row["tokens_per_s"]
        rows.append({**row, **speeds, **{f"{name} x": speeds["ours"] / speeds[name] for name in names[1:]}})
    equal = min(row["equal_tokens"] for row in results)
    millions = options["parameters"] / 1e6
    lines = [
        f"{millions:.0f} million parameters, {options['dtype']}, {options['output_len']} steps; tokens/s",
        *table_lines(rows, "batch", [*columns, *_COLUMNS], 15),
        f"medians of {options['repeats']} runs; at least {equal:.0%} of the tokens equal those of transformers; the "
        f"floor is at {report['gb_per_s']:.1f} GB/s, the most that was measured between the runs",
    ]
    return "\n".join(lines)
