"""The process that `startup` measures: does the same as `jaxllm.generate`, and prints its progress."""

import json
import sys
from collections.abc import Sequence
from contextlib import closing
from typing import Any

from jaxllm.bench import report
from jaxllm.bench.options import open_llm
from jaxllm.cli.common import run_command, setup_compilation_cache, setup_device_memory
from jaxllm.sampling_params import SamplingParams

EVENTS = ("imported", "ready", "first_token", "compiled")  # printed one per line
REPORT = "report"  # the first word of the line with `report.about` in JSON
PROMPT = "def fibonacci(n):"  # for models with a tokenizer


def main(argv: Sequence[str] | None = None) -> int:
    """The one argument is the JSON object of `open_llm`'s arguments."""
    (options,) = sys.argv[1:] if argv is None else argv
    return run_command(lambda: _start(json.loads(options)))


def _start(model: dict[str, Any]) -> int:
    setup_device_memory(model.get("gpu_memory_utilization"))
    setup_compilation_cache()
    import jaxllm.llm  # noqa: F401 - as `open_llm` does

    _tell("imported")
    with open_llm(**model) as llm:
        _tell("ready")
        prompt = PROMPT if llm.tokenizer is not None else {"prompt_token_ids": list(range(min(8, llm.engine.vocab)))}
        params = SamplingParams(temperature=0.8, max_tokens=16, ignore_eos=True)
        with closing(llm.stream(prompt, params)) as updates:
            next(updates)
            _tell("first_token")
        llm.wait_compiled()
        _tell("compiled")
        about = report.about(llm, model=model.get("model"), dummy_weights=model["dummy_weights"])
        print(REPORT, json.dumps(about), flush=True)
    return 0


def _tell(event: str) -> None:
    print(event, flush=True)


if __name__ == "__main__":
    sys.exit(main())
