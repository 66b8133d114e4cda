"""What a snippet is, and how it is run."""

import re
from typing import Any, NamedTuple

_FROM, _IMPORT = re.compile(r"^( *)from vllm\b", re.MULTILINE), re.compile(r"^( *)import vllm$", re.MULTILINE)


class Snippet(NamedTuple):
    """A few lines as they are written for vLLM, and what comes of them here."""

    name: str
    code: str
    check: str = ""  # what is true afterwards; empty if it is refused
    error: str = ""  # the exception's class, or one that it is of; empty if it runs
    message: str = ""  # a part of the exception's
    note: str = ""  # for the table in docs/from_vllm.md


def runs(name: str, code: str, check: str, *, note: str = "") -> Snippet:
    """With the meaning that it has in vLLM, which `check` asserts."""
    return Snippet(name, code, check=check, note=note)


def refused(name: str, code: str, error: str, message: str, *, note: str = "") -> Snippet:
    """With an error that says why, and what to do."""
    return Snippet(name, code, error=error, message=message, note=note)


def execute(snippet: Snippet, names: dict[str, Any]) -> None:
    """Runs it with nothing but its imports changed; `names` are what it finds, and get what it defines."""
    code = _IMPORT.sub(r"\1import jaxllm as vllm", _FROM.sub(r"\1from jaxllm", snippet.code))
    exec(compile(code, snippet.name, "exec"), names)


def kinds(error: BaseException) -> list[str]:
    return [kind.__name__ for kind in type(error).__mro__]
