"""The hub's cache on disk: which snapshots are complete, what they take, and removing them."""

import dataclasses
import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import constants, scan_cache_dir
from huggingface_hub.errors import CacheNotFound

from jaxllm.checkpoint.files import WEIGHTS, WEIGHTS_INDEX
from jaxllm.errors import ModelFormatError
from jaxllm.hub.files import CONFIG, weight_files
from jaxllm.hub.names import HubName, local

log = logging.getLogger(__name__)

_PREFIX = "models--"


class CachedModel(NamedTuple):
    """A revision in the cache."""

    name: str
    refs: tuple[str, ...]  # branches and tags that lead to it
    commit: str
    num_bytes: int
    last_used_s: float  # since 1970
    is_complete: bool


def cache_dir(download_dir: str | os.PathLike[str] | None) -> Path:
    """The given directory, or huggingface_hub's own."""
    return local(download_dir or constants.HF_HUB_CACHE).resolve()


def home() -> Path:
    """jaxllm's own folder of caches, which may not exist yet."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))  # the XDG specification ignores relative paths
    return (base if base.is_absolute() else Path.home() / ".cache") / "jaxllm"


def repo_dir(cache: Path, repo: str) -> Path:
    return cache / f"{_PREFIX}{repo.replace('/', '--')}"


def snapshot_dir(cache: Path, repo: str, commit: str) -> Path:
    return repo_dir(cache, repo) / "snapshots" / commit


def cached_names(cache: Path) -> list[str]:
    """The repositories of which something is in the cache, from the names of its folders alone."""
    folders = cache.glob(f"{_PREFIX}*--*/snapshots/*") if cache.is_dir() else []
    return sorted({folder.parents[1].name.removeprefix(_PREFIX).replace("--", "/", 1) for folder in folders})


def find_complete(cache: Path, name: HubName) -> Path | None:
    """The path of what `name` asks for, if the cache has all of it."""
    commit = name.revision
    if not name.is_pinned:
        ref = repo_dir(cache, name.repo) / "refs" / name.revision
        if not ref.is_file():
            return None
        commit = ref.read_text().strip()
    snapshot = snapshot_dir(cache, name.repo, commit)
    if name.file is not None:
        return snapshot / name.file if all((snapshot / part).is_file() for part in name.parts) else None
    return snapshot if is_complete(snapshot) else None


def is_complete(snapshot: Path) -> bool:
    """Whether the configuration and all weights are there."""
    if not (snapshot / CONFIG).is_file() or not any((snapshot / file).is_file() for file in (WEIGHTS, WEIGHTS_INDEX)):
        return False
    try:
        return all((snapshot / file).is_file() for file in weight_files(snapshot))
    except ModelFormatError:
        return False


def remember(cache: Path, name: HubName, commit: str) -> None:
    """Notes which commit a branch or tag leads to, for starts without a network."""
    if name.is_pinned:
        return
    ref = repo_dir(cache, name.repo) / "refs" / name.revision
    if ref.is_file() and ref.read_text() == commit:
        return
    ref.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=ref.parent, delete=False) as file:
        file.write(commit)
    os.replace(file.name, ref)  # readers see the old one or the new one


def list_models(cache: Path, repo: str | None = None) -> list[CachedModel]:
    """The revisions in the cache, of one repository or of all."""
    try:
        scanned = scan_cache_dir(cache)
    except CacheNotFound:
        return []
    for warning in scanned.warnings:
        log.warning("left out, as it is damaged: %s", warning)
    found = [
        CachedModel(
            each.repo_id,
            tuple(sorted(revision.refs)),
            revision.commit_hash,
            revision.size_on_disk,
            each.last_accessed,
            _has_model(revision.snapshot_path),
        )
        for each in scanned.repos
        if each.repo_type == "model" and repo in (None, each.repo_id)
        for revision in each.revisions
    ]
    return sorted(found)


def _has_model(snapshot: Path) -> bool:
    return is_complete(snapshot) or any(snapshot.rglob("*.gguf"))


def describe(models: Sequence[CachedModel]) -> list[str]:
    """Each revision in a few words, for errors."""
    return [f"{model.commit} ({', '.join(model.refs)})" if model.refs else model.commit for model in models]


def removal(cache: Path, repo: str, models: Sequence[CachedModel]) -> Any:
    """What removing revisions of `repo` frees: an object with `expected_freed_size` in bytes, and `execute()`."""
    scanned = scan_cache_dir(cache)
    # A copy of a repository has the same commits, and the library goes by the commit alone.
    own = frozenset(each for each in scanned.repos if each.repo_type == "model" and each.repo_id == repo)
    return dataclasses.replace(scanned, repos=own).delete_revisions(*(model.commit for model in models))
