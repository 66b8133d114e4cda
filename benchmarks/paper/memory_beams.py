"""Blocks that beams share: what they have in common depends on the model, so the embedded one searches for them.

Its prompts are what it was trained on: pieces of the standard library's source.
"""

import random
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.paper import trace
from benchmarks.paper.memory import BLOCK_SIZE, WIDTHS, PagedUsage, SimulatedRun, saved_row
from jaxllm.bench import report
from jaxllm.errors import JaxLLMError
from jaxllm.llm import LLM
from jaxllm.sampling_params import SamplingParams

MORE = {"alpaca": 8, "sharegpt": 1}  # times as many requests, where they are short
MAX_MODEL_LEN = 1024  # tokens, the embedded model's context
MAX_NUM_SEQS = 48
MAX_NUM_BATCHED_TOKENS = 64
_CHARACTERS = 16  # of source for a token: more than any prompt takes
_LEFT_OUT = {"site-packages", "test", "tests", "idlelib", "encodings", "lib2to3"}  # packages, tests, tables


def open_embedded() -> LLM:
    """The embedded model, all compiled, with a pool that holds as many of its longest sequences as can run."""
    llm = LLM(
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        block_size=BLOCK_SIZE,
        num_blocks=MAX_NUM_SEQS * MAX_MODEL_LEN // BLOCK_SIZE,
    )
    llm.wait_compiled()
    return llm


def measure(*, requests: int, seed: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows of the report, and what they were measured on. `requests` are those of ShareGPT-like lengths, which are cut
    to the model's context."""
    rows = []
    with (
        open_embedded() as llm,
        tqdm(total=len(trace.MEANS) * len(WIDTHS), desc="searching", unit="run", disable=None, leave=False) as bar,
    ):
        max_len = llm.engine.config.max_model_len
        traces = {name: trace.make(name, MORE[name] * requests, seed=seed, max_len=max_len) for name in trace.MEANS}
        for each in traces.values():
            prompts = source_prompts(llm.tokenizer, [item.prompt_len for item in each.items], seed)
            lengths = [item.output_len for item in each.items]
            for width in WIDTHS:
                rows.append(saved_row(each, "beams", width, search(llm, prompts, lengths, width)))
                bar.update()
        about = report.about(llm, model=None, dummy_weights=False)
    return rows, {**about, "max_len": max_len, "traces": {name: each.summary for name, each in traces.items()}}


def search(llm: Any, prompts: Sequence[list[int]], output_lens: Sequence[int], width: int) -> SimulatedRun:
    """Beam searches of given lengths, all handed in at once; every step is looked at."""
    engine, usage, steps = llm.engine, PagedUsage(), 0
    engine.scheduler.pool.forget_keys()
    before = llm.stats().num_preemptions
    for i, (prompt, length) in enumerate(zip(prompts, output_lens, strict=True)):
        params = SamplingParams(beam_width=width, max_tokens=length, ignore_eos=True, detokenize=False)
        engine.add(prompt, params, request_id=f"beams-{width}-{i}")
    with usage.looking(engine.scheduler):
        while engine.has_work():
            for output in engine.step():
                if output.error is not None:
                    raise JaxLLMError(f"a beam search failed: {output.error}")
            steps += 1
    return SimulatedRun(usage, steps, llm.stats().num_preemptions - before)


def source_prompts(tokenizer: Any, lengths: Sequence[int], seed: int, folder: Path | None = None) -> list[list[int]]:
    """For each length so many tokens of some file of the standard library, or of `folder`, from some line on. Raises
    `JaxLLMError` if the files are too short."""
    folder = folder or Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in folder.rglob("*.py") if _LEFT_OUT.isdisjoint(path.relative_to(folder).parts))
    rng = random.Random(f"source-{seed}")
    return [_piece(tokenizer, length, files, rng) for length in lengths]


def _piece(tokenizer: Any, length: int, files: list[Path], rng: random.Random) -> list[int]:
    for path in rng.sample(files, len(files)):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        text = "".join(lines[int(rng.random() * len(lines)) :])
        ids = tokenizer.encode(text[: length * _CHARACTERS])[:length]
        if len(ids) == length:
            return ids
    raise JaxLLMError(
        f"none of {len(files)} files of Python source has {length} tokens to prompt with; measure without beams"
    )
