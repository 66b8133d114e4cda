"""What it costs when KV memory runs out: requests that want several times the pool, preempted by each kind, beside the
same requests on an engine that never starts more than fit to their end."""

from typing import Any

from tqdm import tqdm

from benchmarks.runs import Runs, run_often, table_lines
from jaxllm.bench import report, workload
from jaxllm.bench.options import open_llm
from jaxllm.engine.config import PREEMPTIONS

CAPPED = "none"  # as a kind of preemption
_COLUMNS = (
    ("wall_s", "wall s", ".3f"),
    ("output_tokens_per_s", "output/s", ".1f"),
    ("share_of_capped", "of capped", ".2f"),
    ("preempted", "preempted", "d"),
    ("swapped", "swapped", "d"),
    ("blocks_swapped_out", "blocks out", "d"),
)


def run(
    model: dict[str, Any], *, requests: int, input_len: int, output_len: int, overcommit: float, repeats: int, seed: int
) -> dict[str, Any]:
    """The report. `model` are the arguments of `open_llm`; all requests want `overcommit` times what the pool holds."""
    block_size = model.get("block_size") or _default_block_size()
    blocks_each = -(-(input_len + output_len) // block_size)
    num_blocks = max(blocks_each, int(requests * blocks_each / overcommit))
    sizes: dict[str, Any] = {
        "block_size": block_size,
        "num_blocks": num_blocks,
        "max_model_len": input_len + output_len,
    }
    rows: list[dict[str, Any]] = []
    with tqdm(total=4 * (1 + repeats), desc="measuring", unit="run", disable=None, leave=False) as bar:
        for kinds, num_seqs in (((CAPPED,), num_blocks // blocks_each), (PREEMPTIONS, requests)):
            with open_llm(**model | sizes | {"max_num_seqs": min(requests, num_seqs)}) as llm:
                vocab = min(llm.engine.vocab, workload.MAX_VOCAB)
                prompts = workload.prompts(requests, input_len, vocab=vocab, seed=seed)
                llm.wait_compiled()
                for kind in kinds:
                    if kind != CAPPED:
                        llm.engine.set_preemption(kind)
                    runs = run_often(llm, prompts, output_len, repeats, bar.update)
                    rows.append(_row(kind, runs, requests * output_len))
                about = report.about(llm, model=model.get("model"), dummy_weights=model["dummy_weights"])
    for row in rows:
        row["share_of_capped"] = row["output_tokens_per_s"] / rows[0]["output_tokens_per_s"]
    options = {
        "requests": requests,
        "input_len": input_len,
        "output_len": output_len,
        "overcommit": overcommit,
        "repeats": repeats,
        "seed": seed,
        "vocab": vocab,
        "capped_num_seqs": num_blocks // blocks_each,
    }
    return {"benchmark": "preemption", **about, "options": options, "results": rows}


def _default_block_size() -> int:
    from jaxllm.engine.config import BLOCK_SIZE

    return BLOCK_SIZE


def _row(kind: str, runs: Runs, num_tokens: int) -> dict[str, Any]:
    return {
        "preemption": kind,
        "wall_s": runs.wall_s,
        "output_tokens_per_s": num_tokens / runs.wall_s,
        "preempted": runs.counted("num_preemptions"),
        "swapped": runs.counted("num_swapped"),
        "blocks_swapped_out": runs.counted("blocks_swapped_out"),
    }


def table(results: dict[str, Any]) -> str:
    options = results["options"]
    lines = [
        report.heading(results),
        f"{options['requests']} requests of {options['input_len']} + {options['output_len']} tokens, which want "
        f"{options['overcommit']:g} times the pool of {results['engine']['num_blocks']} blocks of "
        f"{results['engine']['block_size']}; {options['capped_num_seqs']} fit to their end",
        *table_lines(results["results"], "preemption", _COLUMNS, 12),
        f"median of {options['repeats']} runs; sequences, those swapped among them, and blocks",
    ]
    return "\n".join(lines)
