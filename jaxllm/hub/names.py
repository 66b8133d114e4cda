"""Reads what a user types as a model: a path, a name of the hub, or a short name."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from jaxllm.checkpoint.files import gguf_parts, is_gguf, local, read_json
from jaxllm.errors import ModelNotFoundError

SMOLLM2 = "smollm2"  # of the Python package index
ACCEPTED = (
    "a local directory or .gguf file, a name of the hub as org/name, org/name@revision or org/name:FILE.gguf, or "
    f"{SMOLLM2}"
)
MAIN = "main"  # the hub's default branch

_WORD = r"[A-Za-z0-9_](?:[\w.-]*[A-Za-z0-9_])?"
_NAME = re.compile(rf"(?P<repo>{_WORD}/{_WORD})(?:@(?P<revision>[^@:]+))?(?::(?P<file>[^@:]+))?", re.ASCII)
_REVISION = re.compile(rf"{_WORD}(?:/{_WORD})*", re.ASCII)
_SNAPSHOT = re.compile(r".*/models--(?P<name>[^/]+)/snapshots/[0-9a-f]{40}")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_URL = re.compile(
    r"(?:https?:/{1,2})?(?:www\.)?(?:huggingface\.co|hf\.co)/(?P<repo>[^/?#]+/[^/?#]+)"
    r"(?:/(?:tree|blob|resolve)/(?P<revision>[^/?#]+)(?:/(?P<file>[^?#]+))?)?/?(?:[?#].*)?",
    re.IGNORECASE,
)
_SEARCH = "https://huggingface.co/models?search="


@dataclass(frozen=True, kw_only=True)
class HubName:
    """A model of the hub. `str` gives what a user would type for it."""

    repo: str  # org/name
    revision: str = MAIN  # a branch, a tag or a commit
    file: str | None = None  # a .gguf file of the repository, in place of a checkpoint

    @property
    def is_pinned(self) -> bool:
        """Whether the revision is a full commit hash, which never means anything else."""
        return is_commit(self.revision)

    @property
    def parts(self) -> list[str]:
        """The `.gguf` files of the model whose only or first one is `file`."""
        assert self.file is not None
        folder, slash, file = self.file.rpartition("/")
        return [f"{folder}{slash}{part}" for part in gguf_parts(file)]

    def __str__(self) -> str:
        revision = "" if self.revision == MAIN else f"@{self.revision}"
        return f"{self.repo}{revision}" + (f":{self.file}" if self.file else "")


def is_commit(text: str) -> bool:
    """Whether it is the full hash of a commit."""
    return _COMMIT.fullmatch(text) is not None


def parse_name(text: str, revision: str | None = None, known: Iterable[str] = ()) -> Path | HubName | None:
    """A path, a name of the hub, or None for `SMOLLM2`. A path that exists comes first.

    `revision` is an option beside the name; `known` are names to suggest. Raises `ModelNotFoundError` for what is none
    of these, and `ValueError` for a revision that does not fit.
    """
    text, path = without_url(text), local(text)
    if text and (path.exists() or _looks_like_a_path(text)):
        if revision not in (None, MAIN):  # which is the usual one, and asks for nothing
            raise ValueError(f"revision={revision!r} is for names of the hub; {text} is a local path, so leave it out")
        return path
    if text == SMOLLM2:
        if revision not in (None, MAIN):
            raise ValueError(f"revision={revision!r} is for names of the hub; {SMOLLM2} has one version only")
        return None
    match = _NAME.fullmatch(text)
    if match is None or ".." in text or "--" in match["repo"]:
        raise ModelNotFoundError(f"{text!r} is no model: give {ACCEPTED}.{_suggestion(text, known) or _hint(text)}")
    name = HubName(repo=match["repo"], revision=_one_revision(match["revision"], revision), file=match["file"])
    if name.file is not None and not name.file.lower().endswith(".gguf"):
        raise ModelNotFoundError(f"{text!r} names the file {name.file!r}; after a colon goes a .gguf file")
    return name


def without_url(text: str) -> str:
    """The address of a model's page in the hub as the name of that model; other texts as they are."""
    match = _URL.fullmatch(text)
    if match is None:
        return text
    revision = "" if match["revision"] in (None, MAIN) else f"@{match['revision']}"
    file = match["file"] or ""
    return match["repo"] + revision + (f":{file}" if file.lower().endswith(".gguf") else "")


def served_names(model: str) -> tuple[str, ...]:
    """The names of a served model, as it was typed: that of the folder or the GGUF file too where it is a path."""
    model = without_url(model)
    if not model or local(model).exists() or _looks_like_a_path(model):
        path = local(model)  # a file of the hub's cache leads to one without its name
        return tuple(dict.fromkeys([path.stem if is_gguf(path) else path.resolve().name, model]))
    return (model,)


def model_name(model: str) -> str:
    """The name to show for a model, as it was typed: not that of a folder where the hub's can be known."""
    path = local(model)
    if not path.is_dir():
        return served_names(model)[0]
    if cached := _SNAPSHOT.fullmatch(str(path.resolve())):
        return cached["name"].replace("--", "/")
    config = path / "config.json"
    stored = read_json(config).get("_name_or_path") if config.is_file() else None
    return stored if isinstance(stored, str) and _NAME.fullmatch(stored) else served_names(model)[0]


def _looks_like_a_path(text: str) -> bool:
    return text.startswith((".", "/", "~")) or text.split("@")[0].split(":")[0].count("/") > 1


def _one_revision(typed: str | None, option: str | None) -> str:
    if typed and option and typed != option:
        raise ValueError(f"the name says @{typed} and the option revision={option!r}; give one of them")
    revision = typed or option or MAIN
    if not _REVISION.fullmatch(revision) or ".." in revision:
        raise ModelNotFoundError(f"revision {revision!r} is not the name of a branch, a tag or a commit")
    return revision


def _hint(text: str) -> str:
    """For names that other programs know, where the same model may be."""
    name = re.fullmatch(r"(?P<family>[\w.-]+)(?P<tag>:[\w.-]+)?", text, re.ASCII)
    if name is None:
        return ""
    whose = "It looks like a name of Ollama's library. " if name["tag"] else ""
    return f" {whose}The hub's names have an organisation: {_SEARCH}{name['family']} finds them."


def _suggestion(text: str, known: Iterable[str]) -> str:
    wanted = text.rpartition("/")[2].lower()
    near = [name for name in known if wanted and wanted in name.lower()]
    return f" In the cache: {', '.join(sorted(near)[:3])}" if near else ""
