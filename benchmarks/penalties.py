"""What penalties cost: the same requests without, with the repetition penalty that some published models recommend, and
with all kinds, on one engine."""

from typing import Any

from tqdm import tqdm

from benchmarks.runs import Runs, run_often, table_lines
from jaxllm.bench import report, workload
from jaxllm.bench.options import open_llm

KINDS: dict[str, dict[str, float]] = {
    "none": {},
    "repetition": {"repetition_penalty": 1.05},
    "all": {"repetition_penalty": 1.05, "frequency_penalty": 0.1, "presence_penalty": 0.1},
}
_COLUMNS = (
    ("wall_s", "wall s", ".3f"),
    ("output_tokens_per_s", "output/s", ".1f"),
    ("share_of_none", "of none", ".2f"),
    ("steps", "steps", "d"),
    ("ms_a_step", "ms a step", ".2f"),
    ("tokens_a_step", "tokens a step", ".1f"),
    ("preempted", "preempted", "d"),
)


def run(
    model: dict[str, Any], *, requests: int, input_len: int, output_len: int, repeats: int, seed: int
) -> dict[str, Any]:
    """The report. `model` are the arguments of `open_llm`; all requests run at once."""
    sizes: dict[str, Any] = {"max_model_len": input_len + output_len, "max_num_seqs": requests}
    with tqdm(total=len(KINDS) * (1 + repeats), desc="measuring", unit="run", disable=None, leave=False) as bar:
        with open_llm(**model | sizes) as llm:
            vocab = llm.engine.vocab
            prompts = workload.prompts(requests, input_len, vocab=min(vocab, workload.MAX_VOCAB), seed=seed)
            llm.wait_compiled()
            runs = {
                kind: run_often(llm, prompts, output_len, repeats, bar.update, **penalties)
                for kind, penalties in KINDS.items()
            }
            about = report.about(llm, model=model.get("model"), dummy_weights=model["dummy_weights"])
    rows = [_row(kind, runs[kind], requests * output_len) for kind in KINDS]
    for row in rows:
        row["share_of_none"] = row["output_tokens_per_s"] / rows[0]["output_tokens_per_s"]
    options = {"requests": requests, "input_len": input_len, "output_len": output_len, "repeats": repeats, "seed": seed}
    return {"benchmark": "penalties", **about, "options": options | {"vocab": vocab}, "results": rows}


def _row(kind: str, runs: Runs, num_tokens: int) -> dict[str, Any]:
    return {
        "penalties": kind,
        "wall_s": runs.wall_s,
        "output_tokens_per_s": num_tokens / runs.wall_s,
        "steps": runs.num_steps,
        "ms_a_step": 1e3 * runs.wall_s / runs.num_steps,
        "tokens_a_step": runs.counted("num_step_tokens") / runs.num_steps,
        "preempted": runs.counted("num_preemptions"),
    }


def table(results: dict[str, Any]) -> str:
    options = results["options"]
    lines = [
        report.heading(results),
        f"{options['requests']} requests of {options['input_len']} + {options['output_len']} tokens of a vocabulary of "
        f"{options['vocab']}",
        *table_lines(results["results"], "penalties", _COLUMNS, 15),
        f"median of {options['repeats']} runs",
    ]
    return "\n".join(lines)
