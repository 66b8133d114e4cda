"""What the documents name exists: files, tests, modules, attributes, links, commands and their options."""

import ast
import asyncio
import builtins
import contextlib
import dataclasses
import functools
import importlib
import io
import re
import shlex
import sys
import textwrap
import tomllib
import types

import jax
import pytest

from jaxllm.cli.main import COMMANDS
from jaxllm.cli.main import main as jaxllm
from jaxllm.models import registry
from jaxllm.models.registry import ARCHITECTURES
from tests.stand_ins import make_models, served
from tests.test_packaging import FOLDERS, ROOT, sources

DOCUMENTS = sorted(
    str(file.relative_to(ROOT))
    for pattern in ("README.md", "CONTRIBUTING.md", "docs/*.md", "deploy/*.md", "examples/*.md")
    for file in ROOT.glob(pattern)
)
WORKFLOWS = [str(file.relative_to(ROOT)) for file in sorted((ROOT / ".github/workflows").glob("*.yml"))]
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
INDENTED = re.compile(r"(?<=\n\n)((?:    .*\n)+)")
INLINE = re.compile(r"(?<!\[)`([^`\n]+)`")  # the text of a link is not asked: its target is
LINK = re.compile(r"\]\(([^)#\s]+)")
PATH = re.compile(r"[\w.-]+(/[\w.-]+)*/?")


def text_of(document: str) -> str:
    return (ROOT / document).read_text()


def names_in(document: str) -> list[str]:
    """What stands in backticks, outside of blocks."""
    return INLINE.findall(FENCE.sub("", text_of(document)))


def command_lines(document: str) -> list[list[str]]:
    """The words of each command of ours, wherever it stands."""
    text = text_of(document)
    blocks = [block for _, language, block in FENCE.findall(text) if language != "python"] + INDENTED.findall(text)
    lines = [*names_in(document), *(line for block in blocks for line in block.splitlines())]
    found = []
    for line in lines:
        for part in re.split(r"&&|[;|]\s", line):
            match = re.search(r"(?:^|[\s$])(?:python(?:3)? -m (?=jaxllm|benchmarks)|(?=jaxllm [a-z-]))(.*)", part)
            if match:
                found.append(shlex.split(match[1], comments=True))
    return found


@functools.cache
def homes_of_tests() -> dict[str, set[str]]:
    """Name of a test -> the files that have it."""
    found: dict[str, set[str]] = {}
    for file in (ROOT / "tests").rglob("*.py"):
        for name in re.findall(r"def (test_\w+)", file.read_text()):
            found.setdefault(name, set()).add(str(file.relative_to(ROOT)))
    return found


@functools.cache
def file_names() -> set[str]:
    return {file.name for folder in FOLDERS for file in (ROOT / folder).rglob("*.*")}


@functools.cache
def members() -> dict[str, set[str]]:
    """Name of a class of ours -> its attributes, methods and fields, those of its bases of ours too."""
    found: dict[str, set[str]] = {}
    bases: dict[str, set[str]] = {}
    for file in sources().values():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                own = found.setdefault(node.name, set())
                bases.setdefault(node.name, set()).update(
                    b.attr if isinstance(b, ast.Attribute) else getattr(b, "id", "") for b in node.bases
                )
                for part in ast.walk(node):
                    if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                        own.add(part.name)
                    elif isinstance(part, ast.Attribute | ast.Name) and isinstance(part.ctx, ast.Store):
                        own.add(part.attr if isinstance(part, ast.Attribute) else part.id)
    for name in found:
        for base in bases[name] & found.keys():
            found[name] |= found[base]
    return found


def problem(name: str, document: str) -> str | None:
    """Why `name`, as it stands in backticks, is wrong; None if it names nothing that is checked, or something real."""
    path, _, test = name.partition("::")
    if test:
        return None if path in homes_of_tests().get(test, ()) else "no such test"
    if re.fullmatch(r"test_\w+", name):
        return None if name in homes_of_tests() else "no such test"
    if re.fullmatch(r"(jaxllm|benchmarks|tests)(\.\w+)+", name):
        return module_problem(name)
    if re.fullmatch(r"[A-Z][a-z]+([A-Z][a-z]+)+", name):
        return None if name in members() or hasattr(builtins, name) else "no such class"
    if re.fullmatch(r"[A-Z]\w+\.\w+", name):
        owner, member = name.split(".")
        return None if owner not in members() or member in members()[owner] else f"{owner} has no {member}"
    first = path.split("/")[0]
    if PATH.fullmatch(path) and (
        ("/" in path and (ROOT / first).exists()) or re.search(r"\.(py|md|toml|yml|cc|sh)$", path)
    ):
        places = [ROOT, (ROOT / document).parent, ROOT / "jaxllm"]
        is_there = any((place / path).exists() for place in places) or path in file_names()
        return None if is_there else "no such file"
    return None


def module_problem(name: str) -> str | None:
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            if not hasattr(found, part):
                return f"{'.'.join(parts[:count])} has no {part}"
            found = getattr(found, part)
        return None
    return "no such module"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_what_is_named_exists(document):
    wrong = [f"{name}: {why}" for name in names_in(document) if (why := problem(name, document))]
    links = [link for link in LINK.findall(text_of(document)) if "://" not in link]
    wrong += [f"{link}: a link to nothing" for link in links if not ((ROOT / document).parent / link).exists()]
    assert not wrong, "\n".join(wrong)


def help_of(words: list[str]) -> str:
    """What `jaxllm WORDS --help` prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed), contextlib.suppress(SystemExit):
        if words[0] == "benchmarks":
            importlib.import_module("benchmarks.__main__").main([*words[1:], "--help"])
        else:
            jaxllm([*words[1:], "--help"])
    return printed.getvalue()


def command_problem(words: list[str]) -> str | None:
    """Why a command line, `python -m` left out, is wrong; None if it is not."""
    module, *rest = words
    if "." in module and module.split(".")[1] not in COMMANDS:  # a module that is a program
        exists = module in sources() or (ROOT / f"{module.replace('.', '/')}.py").exists()
        return None if exists else "no such module"
    package, name, *options = [*module.split("."), *rest]
    if name.startswith("-"):
        return None
    for choice in name.split("|"):
        chosen = [package, choice]
        if choice == "bench" and options and not options[0].startswith("-"):
            chosen.append(options[0])
        text = help_of(chosen)
        if "usage:" not in text or f"usage: {package} COMMAND" in text or "error:" in text:
            return f"there is no {' '.join(chosen)}"
        unknown = [word for word in options if re.match(r"--[a-z]", word) and word.split("=")[0] not in text]
        if unknown:
            return f"{' '.join(chosen)} has no {unknown}"
    return None


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_exist_and_have_their_options(document):
    wrong = [f"{words}: {why}" for words in command_lines(document) if (why := command_problem(words))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("jaxllm.bench steps", "there is no jaxllm bench steps"),
        ("jaxllm serve --prot 1", "jaxllm serve has no ['--prot']"),
        ("jaxllm chat|talk", "there is no jaxllm talk"),
        ("jaxllm.nothing", "no such module"),
        ("benchmarks nothing", "there is no benchmarks nothing"),
        ("jaxllm.bench serve --streams 256", None),
        ("jaxllm.pallas_kernels.native.build", None),
    ],
)
def test_a_wrong_command_is_noticed(line, why):
    assert command_problem(line.split()) == why


def test_commands_are_found():
    assert [words[0] for words in command_lines("README.md")].count("jaxllm.bench") >= 2
    assert ["jaxllm", "chat"] in command_lines("README.md")
    assert [words[:3] for words in command_lines("README.md")].count(["jaxllm", "generate", "--chat"]) == 1


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("jaxllm/engine/batch.py", "no such file"),
        ("tests/test_llm.py::test_nothing", "no such test"),
        ("jaxllm.engine.request", "jaxllm.engine has no request"),
        ("BlockPool.nothing", "BlockPool has no nothing"),
        ("BlockPool.check", None),
        ("RunningList", "no such class"),
        ("jaxllm.LLM", None),
        ("a/b", None),
    ],
)
def test_a_wrong_name_is_noticed(name, why):
    assert problem(name, "README.md") == why


@pytest.mark.parametrize("document", DOCUMENTS)
def test_python_in_documents_compiles_and_imports_what_exists(document):
    for _, language, block in FENCE.findall(text_of(document)):
        if language != "python":
            continue
        tree = compile(block, document, "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "jaxllm":
                for alias in node.names:
                    assert module_problem(f"{node.module}.{alias.name}") is None


@dataclasses.dataclass(frozen=True)
class Block:
    """One of Python. `line` is its first line's number in the document, counted from 0."""

    line: int
    text: str


def python_blocks(document: str) -> list[Block]:
    text = text_of(document)
    return [
        Block(text[: match.start()].count("\n") + 1, match[3]) for match in FENCE.finditer(text) if match[2] == "python"
    ]


def run_block(document: str, block: Block, names: dict) -> None:
    """With the document's lines in tracebacks."""
    with served(textwrap.dedent(block.text)) as text:
        source = "\n" * block.line + text
        awaited = eval(compile(source, document, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
        if awaited is not None:
            asyncio.run(awaited)


NEEDS = {
    "docs/evaluation.md": ["lm_eval"],
    "docs/training.md": ["optax", "orbax.checkpoint"],
    "docs/your_model.md": ["qwix"],
}
SLOW = {"README.md", "docs/evaluation.md", "docs/recipes.md", "docs/training.md"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Qwix calls Flax by older names
@pytest.mark.parametrize(
    "document",
    [
        pytest.param(document, marks=[pytest.mark.slow] if document in SLOW else [])
        for document in DOCUMENTS
        if python_blocks(document)
    ],
)
def test_python_in_documents_runs(document, tmp_path, monkeypatch):
    """All of it, with JAX's defaults, in an empty directory but for the models that it names, one block after the
    other, as in a module."""
    for package in NEEDS.get(document, ()):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    make_models(tmp_path, text_of(document))
    module = types.ModuleType("of_the_document")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    ours = {name: file for name, file in ARCHITECTURES.items() if isinstance(file, str)}  # none of other tests'
    monkeypatch.setattr(registry, "ARCHITECTURES", ours)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for block in python_blocks(document):
            run_block(document, block, vars(module))


def test_the_table_of_models_is_that_of_the_registry():
    listed = re.findall(r"\[`models/(\w+)\.py`\]\(\.\./models/\1\.py\) \| (.*) \|", text_of("docs/models.md"))
    found = {name: file for file, names in listed for name in re.findall(r"`(\w+)`", names)}
    assert found == {name: file for name, file in ARCHITECTURES.items() if isinstance(file, str)}


def test_the_readme_lists_the_folders_that_are_packed():
    listed = re.findall(r"^\| `(\w+)/` \|", text_of("README.md"), re.MULTILINE)
    (root,) = tomllib.loads(text_of("pyproject.toml"))["tool"]["setuptools"]["package-dir"].values()
    package = ROOT / root / "jaxllm"
    links = [path.resolve() for path in package.iterdir() if path.is_symlink()]
    assert listed == list(FOLDERS)
    assert {package.resolve(), *links} == {ROOT / folder for folder in FOLDERS}


def test_each_document_is_linked_from_the_readme():
    for file in (ROOT / "docs").glob("*.md"):
        assert f"(docs/{file.name})" in text_of("README.md"), file.name


def test_versions_of_the_linters_are_the_same_everywhere():
    extra = tomllib.loads(text_of("pyproject.toml"))["project"]["optional-dependencies"]["test"]
    (ruff,) = [name.removeprefix("ruff==") for name in extra if name.startswith("ruff==")]
    assert re.search(r"ruff-pre-commit\n +rev: v(\S+)", text_of(".pre-commit-config.yaml"))[1] == ruff
    (pyright,) = [name.removeprefix("pyright==") for name in extra if name.startswith("pyright==")]
    assert f'"pyright": "{pyright}"' in text_of(".ci/types_baseline.json")


@pytest.mark.parametrize("file", [".ci/run", ".pre-commit-config.yaml", *WORKFLOWS])
def test_ci_calls_parts_that_exist(file):
    called = set(re.findall(r"(?<![\w/])\.ci/\w+\b(?!\.)", text_of(file)))
    assert called
    for part in called:
        assert (ROOT / part).stat().st_mode & 0o100, f"{part} can't be run"
