"""The process that renders chat templates: a Jinja engine cannot bound the memory of what it renders, a process can.

Each line of standard input is a JSON object with `template` and `variables`; each answer is a line with `text` or
`error`. The process holds the template engine and plain JSON values only.
"""

import datetime
import json
import re
import resource
import sys
from functools import lru_cache
from typing import Any

import minijinja

MAX_MEMORY_BYTES = 2**28
MAX_CHARS = 2**23  # of a rendered conversation
FUEL = 10_000_000  # instructions, and characters / 64 since minijinja 3.1; a long conversation takes some 100,000
_NO_MEMORY = {"error": f"needs more than {MAX_MEMORY_BYTES >> 20} MiB of memory"}
# The tag marks what the assistant wrote, for training. A condition in its place keeps the whitespace around it.
_GENERATION = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")


class _Refusal(Exception):
    """The template's own `raise_exception`."""


def _raise_exception(message: Any) -> None:
    raise _Refusal(str(message))


def _strftime_now(style: str) -> str:
    return datetime.datetime.now().strftime(style)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """`tojson` as in transformers; minijinja's own escapes HTML. (minijinja passes the float 1.0 as 1.)"""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache(maxsize=8)
def _environment(template: str) -> minijinja.Environment:
    source = _GENERATION.sub(lambda tag: f"{{%{tag[1]} {'endif' if tag[2] else 'if true'} {tag[3]}%}}", template)
    return minijinja.Environment(
        templates={"chat": source},
        fuel=FUEL,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_escape_callback=lambda name: False,
        filters={"tojson": _to_json},
        globals={"raise_exception": _raise_exception, "strftime_now": _strftime_now},
    )


def _answer(line: bytes) -> dict[str, str]:
    try:
        request = json.loads(line)
        text = _environment(request["template"]).render_template("chat", **request["variables"])
    except _Refusal as refusal:
        return {"error": f"refuses the conversation: {refusal}"}
    except minijinja.TemplateError as error:
        if error.kind == "OutOfFuel":
            return {"error": f"runs for more than {FUEL} instructions (a long text counts as many)"}
        return {"error": f"failed: {error.message}".replace("(in chat:", "(in line ")}
    except MemoryError:
        return _NO_MEMORY
    except Exception as error:  # noqa: BLE001 - a filter may raise anything; the caller gets the error
        return {"error": f"failed: {type(error).__name__}: {error}"}
    if len(text) > MAX_CHARS:
        return {"error": f"writes {len(text)} characters; at most {MAX_CHARS} are allowed"}
    return {"text": text}


def main() -> None:
    if sys.platform == "linux":  # macOS accepts the limit but does not enforce it
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        soft = MAX_MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MAX_MEMORY_BYTES, hard)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    for line in sys.stdin.buffer:
        try:
            answer = json.dumps(_answer(line))
        except MemoryError:
            answer = json.dumps(_NO_MEMORY)
        print(answer, flush=True)


if __name__ == "__main__":
    main()
