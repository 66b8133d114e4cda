"""The process that compiles untrusted grammars. The first line of standard input is a tokenizer; each further line has
the fields of `StructuredOutputs`, and its answer is {} or {"error": ...}."""

import json
import resource
import sys
import threading
import time

from jaxllm.grammar.compiler import GrammarCompiler
from jaxllm.structured_outputs import StructuredOutputs

MAX_S = 3  # processor time of one grammar, after which the system kills this process
MAX_MEMORY_BYTES = 4 << 30
STACK_BYTES = 1 << 20  # less than the stack of the threads that compile the same grammar later


class _Source:
    """The part of a tokenizer that `GrammarCompiler` needs."""

    def __init__(self, source: str):
        self.json = source
        self.vocab_size = 0  # llguidance determines it


def _answer(compiler: GrammarCompiler, line: bytes) -> dict[str, str]:
    try:
        compiler.compile(StructuredOutputs(**json.loads(line)))
    except ValueError as error:
        return {"error": str(error)}
    except MemoryError:
        return {"error": "the grammar needs too much memory; simplify it"}
    except Exception as error:  # noqa: BLE001 - the caller gets the error
        return {"error": f"the grammar can't be compiled: {type(error).__name__}: {error}"}
    return {}


def _serve() -> None:
    source = json.loads(sys.stdin.buffer.readline())
    compiler = GrammarCompiler(None if source is None else _Source(source), 0, ())
    compiler.warm_up()
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    for line in sys.stdin.buffer:
        soft = int(time.process_time()) + 1 + MAX_S
        resource.setrlimit(resource.RLIMIT_CPU, (soft if hard < 0 else min(soft, hard), hard))
        print(json.dumps(_answer(compiler, line)), flush=True)


def main() -> None:
    if sys.platform == "linux":  # macOS accepts the limit but does not enforce it
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        soft = MAX_MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MAX_MEMORY_BYTES, hard)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_serve)
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
