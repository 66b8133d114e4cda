"""The process that parses untrusted files. Its only output is JSON lines to its parent.

Nothing that it imports may import jax, which starts slowly and is not needed.
"""

import json
import os
import sys
from typing import Any


def main(job: dict[str, Any]) -> None:
    """Does `job` ({"task": ..., ...}) and writes {"bytes": n} for progress, then {"result": ...} or {"error": ...}.

    Invalid input gives an error; anything else is a bug and ends with a traceback.
    """
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # keeps the output of libraries out of the messages

    def send(**message: Any) -> None:
        print(json.dumps(message), file=channel, flush=True)

    task = _weights if job["task"] == "weights" else _tokenizer
    try:
        send(result=task(job, lambda count: send(bytes=count)))
    except MemoryError:
        send(error="there is not enough memory to convert it; free some, or convert it on a larger machine")
    except (ValueError, OSError) as error:
        send(error=str(error))


def _weights(job: dict[str, Any], report) -> Any:
    from jaxllm.convert.weights import convert

    return convert(job, report)


def _tokenizer(job: dict[str, Any], report) -> Any:
    from jaxllm.convert.fast_tokenizer import convert

    return convert(job)
