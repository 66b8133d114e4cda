"""docs/from_vllm.md, of the snippets and of the tables of arguments: `python -m tests.from_vllm.table` writes it."""

from pathlib import Path

from jaxllm.from_vllm.engine_arguments import ENGINE_ARGUMENTS
from jaxllm.from_vllm.missing import MissingMethods
from jaxllm.from_vllm.names import ABSENT
from jaxllm.from_vllm.request_arguments import CHAT_ARGUMENTS, GENERATE_ARGUMENTS, SAMPLING_FIELDS
from jaxllm.from_vllm.rules import Hint, Only, Renamed, Rule
from tests.from_vllm import construction, interfaces, requests
from tests.from_vllm.snippet import Snippet

FILE = Path(__file__).parents[2] / "docs" / "from_vllm.md"
SECTIONS = {
    "Building an engine": construction.SNIPPETS,
    "Prompts": requests.PROMPTS,
    "Sampling parameters": requests.PARAMETERS,
    "Outputs, conversations, beam search": requests.OUTPUTS,
    "The tokenizer": interfaces.TOKENIZER,
    "The engine": interfaces.ENGINE,
    "Imports": interfaces.IMPORTS,
}
ALL = [snippet for snippets in SECTIONS.values() for snippet in snippets]

_TOP = """# From vLLM

This file is written by `python -m tests.from_vllm.table`, of what `tests/from_vllm` runs.

Of {total} snippets that are common in programs for vLLM {running} run with nothing but `vllm` changed to `jaxllm` in
their imports, and mean what they mean there. The others raise an error that says what is not there, and what to do.

What differs although nothing is refused:

- A seed gives the same text each time, but not vLLM's: the generator is another one.
- The score of a beam is its log-probability divided by the length of the output, as in `transformers`; vLLM divides by
  the length of prompt and output.
- `best_of`, `beam_width`, `top_p=0` and `n` above 1 with `temperature=0` are accepted, and not by vLLM.
- A name that is unknown, of an argument or a field, is always an error.

An argument of vLLM's that is none of ours is one of three kinds: it says *how* vLLM shall work, which changes nothing
here, and any value is accepted (the log says so, at level INFO); or it asks for something, and the values that ask for
nothing are accepted, while others raise `ValueError`; or it has another name here.
"""


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def _snippet(snippet: Snippet) -> str:
    code = "<br>".join(f"`{line}`" for line in snippet.code.replace("**SIZES", "...").splitlines())
    here = f"`{snippet.error}`: ... {snippet.message} ..." if snippet.error else "runs"
    return _row(snippet.name, code, here, snippet.note)


def _argument(name: str, rule: Rule) -> str:
    match rule:
        case Hint(note):
            return _row(f"`{name}`", "any value", note)
        case Only(accepted, refusal):
            values = "what is empty or off" if callable(accepted) else ", ".join(f"`{value!r}`" for value in accepted)
            return _row(f"`{name}`", values, f"others: {refusal}")
        case Renamed(ours):
            return _row(f"`{name}`", "any value", f"it is `{ours}`")


def _table(title: str, rules: dict[str, Rule]) -> str:
    rows = [_argument(name, rule) for name, rule in sorted(rules.items())]
    return "\n".join([f"## {title}\n", _row("argument", "accepted", "why, and what to do"), "|---|---|---|", *rows, ""])


def render() -> str:
    """The whole file."""
    parts = [_TOP.format(total=len(ALL), running=sum(not snippet.error for snippet in ALL))]
    for title, snippets in SECTIONS.items():
        head = [f"## {title}\n", _row("snippet", "code", "here", "note"), "|---|---|---|---|"]
        parts.append("\n".join([*head, *map(_snippet, snippets), ""]))
    parts.append(_table("Arguments of `LLM`, `AsyncLLM` and EngineArgs that are vLLM's alone", ENGINE_ARGUMENTS))
    parts.append(_table("Fields of `SamplingParams` that are vLLM's alone", SAMPLING_FIELDS))
    parts.append(_table("Arguments of `generate` that are vLLM's alone", GENERATE_ARGUMENTS))
    parts.append(_table("Arguments of `chat` that are vLLM's alone", CHAT_ARGUMENTS))
    methods = [name for name in vars(MissingMethods) if not name.startswith("_")]
    rows = [_row(f"LLM.{name}", getattr(MissingMethods, name).__doc__.partition(": ")[2]) for name in methods]
    rows += [_row(name, why) for name, why in sorted(ABSENT.items())]
    parts.append(
        "\n".join(
            ["## Methods and names that are not there\n", _row("name", "why, and what to do"), "|---|---|", *rows, ""]
        )
    )
    return "\n".join(parts)


if __name__ == "__main__":
    FILE.write_text(render())
