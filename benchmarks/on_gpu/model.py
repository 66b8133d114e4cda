"""Whole greedy generations of a random model of a billion parameters, held against float32 on the host's CPU.

The CPU computes each output in one pass over the prompt and the device's own tokens, so that every token is judged by
what comes before it: it must be the CPU's best, or nearly as good as that. Random weights make a hard case, as the best
of 128,000 logits is often close to the next.
"""

import dataclasses
import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.kernels import WrongResultError
from benchmarks.on_gpu.child import Recorder
from benchmarks.on_gpu.engines import SMALL_CONFIG, few_executables
from jaxllm.bench import workload
from jaxllm.engine.dummy import dummy_model
from jaxllm.llm import LLM
from jaxllm.models import registry, transformer
from jaxllm.models.cache import Dense
from jaxllm.models.context import StepContext
from jaxllm.outputs import RequestOutput
from jaxllm.sampling_params import SamplingParams
from jaxllm.sharding.mesh import make_mesh

# The shape of Llama-3.2-1B, 1.24 billion parameters.
CONFIG = SMALL_CONFIG | {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
}
PROMPTS, OUTPUT_LEN = (1, 5, 33, 64, 100, 150, 200, 300), 48
SMALL_PROMPTS, SMALL_OUTPUT_LEN = (1, 20), 6
TOKENS, SMALL_TOKENS = (8, 64, 512), (8,)
NUM_TOP = 5
# How much worse than the best a token's logit may be, and how far a log-probability may be off, as shares of the
# largest logit: products of float32 are made from TF32 on a GPU, which has ten bits; bfloat16 has seven.
TOLERANCE = {"float32": 5e-3, "bfloat16": 3e-2}


def run(record: Recorder, small: bool) -> str:
    found = {}
    dtypes = ("float32",) if small else ("bfloat16", "float32")
    for dtype in dtypes:
        with tempfile.TemporaryDirectory() as directory:
            (Path(directory) / "config.json").write_text(json.dumps(SMALL_CONFIG if small else CONFIG))
            found[dtype] = compare(Path(directory), dtype, small)
        record("dtypes", found)
    wrong = {dtype: result for dtype, result in found.items() if not result["ok"]}
    if wrong:
        raise WrongResultError(f"tokens or log-probabilities are worse than allowed: {wrong}")
    return ", ".join(
        f"{dtype}: {row['equal']} of {row['tokens']} tokens are the CPU's, the worst lacks {row['worst_share']:.1e} of "
        f"{row['tolerance']:.0e}"
        for dtype, row in found.items()
    )


def compare(directory: Path, dtype: str, small: bool) -> dict[str, Any]:
    mesh = make_mesh(None)
    cfg, params = dummy_model(directory, dtype, mesh)
    lengths, output_len = (SMALL_PROMPTS, SMALL_OUTPUT_LEN) if small else (PROMPTS, OUTPUT_LEN)
    prompts = [workload.prompts(1, n, vocab=min(cfg.vocab, 8000), seed=n)[0] for n in lengths]
    outputs = {full: generate((cfg, params), mesh, prompts, output_len, full, small) for full in (False, True)}
    oracle = Oracle(cfg, params, max(lengths) + output_len, output_len)
    del params
    parts = [judge(oracle, output) for both in outputs.values() for output in both]
    result: dict[str, Any] = {
        "tokens": sum(part["tokens"] for part in parts),
        "equal": sum(part["equal"] for part in parts),
        "worst_share": max(part["worst_share"] for part in parts),
        "worst_logprob_share": max(part["worst_logprob_share"] for part in parts),
        "tolerance": TOLERANCE[dtype],
        "samplers_agree": [o.outputs[0].token_ids for o in outputs[False]]
        == [o.outputs[0].token_ids for o in outputs[True]],
    }
    return result | {"ok": max(result["worst_share"], result["worst_logprob_share"]) <= TOLERANCE[dtype]}


def generate(
    model: Any, mesh: Any, prompts: list[list[int]], output_len: int, full: bool, small: bool
) -> list[RequestOutput]:
    """By the engine; `full` with log-probabilities, for which another sampler runs."""
    tokens = SMALL_TOKENS if small else TOKENS
    params = SamplingParams(
        temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False, logprobs=NUM_TOP if full else None
    )
    sizes: dict[str, Any] = {"max_num_seqs": len(prompts), "max_num_batched_tokens": tokens[-1], "num_blocks": 256}
    with (
        few_executables(tokens, full_sampler=full),
        LLM(model, mesh=mesh, max_model_len=max(map(len, prompts)) + output_len, **sizes) as llm,
    ):
        llm.wait_compiled()
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    if errors := [output.error for output in outputs if output.error is not None]:
        raise WrongResultError(f"{len(errors)} requests failed: {errors[0]}")
    return outputs


class Oracle:
    """The model in float32 on the CPU, without a cache, for sequences of up to `most` tokens."""

    def __init__(self, cfg: Any, params: Any, most: int, output_len: int):
        cpu = jax.devices("cpu")[0]
        exact = dataclasses.replace(cfg, dtype=jnp.float32)
        self._most = most
        graph = nnx.graphdef(transformer.abstract(registry.model_for(exact), exact))
        self._params = jax.tree.map(lambda x: jax.device_put(np.asarray(x).astype(np.float32), cpu), params)

        @jax.jit
        def forward(params: Any, tokens: jax.Array, last: jax.Array) -> jax.Array:
            model = nnx.merge(graph, params)
            ctx = StepContext.of(tokens)
            hidden, _ = model(tokens[None], StepContext.of(tokens[None]), [Dense()] * exact.num_layers)
            return model.logits(jax.lax.dynamic_slice_in_dim(hidden[0], last, output_len), ctx)

        self._forward = partial(forward, self._params)

    def logits(self, prompt: list[int], output: list[int]) -> np.ndarray:
        """`[len(output), vocab]`: those that each token of the output is drawn from."""
        tokens = np.zeros(self._most, np.int32)
        tokens[: len(prompt) + len(output)] = prompt + output
        return np.asarray(self._forward(tokens, np.int32(len(prompt) - 1))).astype(np.float64)


def judge(oracle: Oracle, output: RequestOutput) -> dict[str, Any]:
    """How many tokens are the best ones, and how far the worst is from that, as a share of the largest logit."""
    (completion,) = output.outputs
    tokens = list(completion.token_ids)
    logits = oracle.logits(list(output.prompt_token_ids), tokens)
    scale = np.abs(logits).max()
    lacking = logits.max(axis=1) - logits[np.arange(len(tokens)), tokens]
    off = [0.0]
    if completion.logprobs is not None:
        top = logits.max(axis=1)
        normalizers = top + np.log(np.exp(logits - top[:, None]).sum(axis=1))
        for row, normalizer, entries in zip(logits, normalizers, completion.logprobs, strict=True):
            assert entries is not None  # of tokens that were drawn
            off += [abs(entry.logprob - (row[token] - normalizer)) for token, entry in entries.items()]
    return {
        "tokens": len(tokens),
        "equal": int((logits.argmax(axis=1) == tokens).sum()),
        "worst_share": float(lacking.max() / scale),
        "worst_logprob_share": float(max(off) / scale),
    }
