"""What the shipped model learns from: Python source files, and requests for the functions and classes in them."""

import ast
import hashlib
import importlib.util
import itertools
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

USER, ASSISTANT = "<|user|>", "<|assistant|>"
# Tests, tables of characters, copies of other packages and the build's own paths teach a small model little.
LEFT_OUT = {"site-packages", "test", "tests", "testing", "idlelib", "encodings", "_vendor", "python-config.py"}
MAX_ANSWER = 1200  # characters, so that most examples fit into one row
REQUESTS = {
    "function": (
        "Write a function {name} that does this: {does}",
        "Write a Python function called {name}. {does}",
        "Implement {name}: {does}",
        "I need a function. {does}",
        "{does} Call it {name}.",
        "Write a function: {does}",
    ),
    "class": (
        "Write a class {name}. {does}",
        "Write a Python class called {name}: {does}",
        "Implement the class {name}.",
        "I need a class. {does}",
    ),
}


class Texts(NamedTuple):
    train: list[str]
    heldout: list[str]


def fraction(name: str) -> float:
    """A number in [0, 1) that only the name decides, so that choices stay the same between runs."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4]) / 2**32


def source_folder(source: str) -> Path:
    """The folder of `source`: "stdlib", a folder, or a package that can be imported. ValueError if there is none."""
    if source == "stdlib":
        return Path(sysconfig.get_paths()["stdlib"])
    if Path(source).is_dir():
        return Path(source)
    spec = importlib.util.find_spec(source) if source.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"{source!r} is neither a folder nor an installed package; install it or leave it out")
    return Path(spec.submodule_search_locations[0])


def read_source(folder: Path, holdout: float, share: float = 1.0, seen: frozenset[str] = frozenset()) -> Texts:
    """Texts of the `*.py` files to train on, and those held out, both chosen by name.

    A `share` below 1 keeps that part of the files; 2.5 repeats all twice, and half of them once more. Empty files,
    copies, and texts in `seen` are left out.
    """
    train, heldout, known = [], [], {"", *seen}
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder)
        if not LEFT_OUT.isdisjoint(name.parts) or name.name.startswith("_sysconfigdata"):
            continue
        text = path.read_text(encoding="utf-8")
        if text in known:
            continue
        known.add(text)
        copies = int(share + fraction(f"share {name.as_posix()}"))
        if fraction(name.as_posix()) < holdout:
            heldout += [text] * min(copies, 1)
        else:
            train += [text] * copies
    return Texts(train, heldout)


def read_sources(sources: list[str], holdout: float) -> list[Texts]:
    """Texts of each source, `NAME` or `NAME:SHARE`; what an earlier source has or held out is not read again.

    ValueError if a source gives nothing to train on, or the first one nothing held out.
    """
    found: list[Texts] = []
    for source in sources:
        name, _, share = source.partition(":")
        seen = frozenset(text for texts in found for part in texts for text in part)
        texts = read_source(source_folder(name), holdout, float(share or 1), seen)
        if not texts.train or not (found or texts.heldout):
            files = f"{len(texts.train)} files to train on and {len(texts.heldout)} held out"
            raise ValueError(f"{source} gives {files}; take a --source of more *.py files or another --holdout")
        found.append(texts)
    return found


def chat_text(request: str, answer: str) -> str:
    """One exchange as the chat template writes it, but for start and end token."""
    return f"{USER}{request}{ASSISTANT}{answer}"


def chat_examples(text: str) -> Iterator[str]:
    """An exchange for each documented function and class in `text`: its name and docstring ask, its source answers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in other people's source
        try:
            tree = ast.parse(text)
        except SyntaxError:  # templates and fixtures
            return
    lines = text.split("\n")
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("__"):
            continue
        if not (doc := ast.get_docstring(node)):
            continue
        does = " ".join(doc.split("\n\n")[0].split())
        does = does.partition(". ")[0].removesuffix(".") + "."
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]) - 1
        answer = textwrap.dedent("\n".join(lines[first : node.end_lineno])).rstrip()
        if len(does) <= 200 and len(answer) <= MAX_ANSWER and answer.count("\n") >= 2:
            forms = REQUESTS["class" if isinstance(node, ast.ClassDef) else "function"]
            form = forms[int(fraction(answer) * len(forms))]
            yield chat_text(form.format(name=node.name, does=does), answer + "\n")


def choose_chat(texts: list[str], share: float) -> list[str]:
    """Exchanges from `texts` that make up `share` of the characters of texts and exchanges together."""
    return _first(_all_examples(texts), share, texts)


def choose_definitions(texts: list[str], share: float) -> list[str]:
    """Functions and classes on their own, likewise: prompts begin with one, files hardly ever. Those that
    `choose_chat` takes first come last."""
    return _first([example.partition(ASSISTANT)[2] for example in reversed(_all_examples(texts))], share, texts)


def _all_examples(texts: list[str]) -> list[str]:
    return sorted({example for text in dict.fromkeys(texts) for example in chat_examples(text)}, key=fraction)


def _first(examples: list[str], share: float, texts: list[str]) -> list[str]:
    budget = share / (1 - share) * sum(map(len, texts))
    ends = itertools.accumulate(map(len, examples))
    return [example for example, end in zip(examples, ends, strict=True) if end <= budget]
