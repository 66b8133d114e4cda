"""Fetches files of one commit of a repository into the hub's cache."""

import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, hf_hub_download

import jaxllm
from jaxllm.errors import DownloadError
from jaxllm.hub.cache import snapshot_dir
from jaxllm.hub.explain import explained
from jaxllm.hub.names import HubName, is_commit
from jaxllm.hub.progress import DownloadProgress, size
from jaxllm.stderr import say

log = logging.getLogger(__name__)

_WORKERS = 8  # files at a time
_LIBRARY = {"library_name": "jaxllm", "library_version": jaxllm.__version__}


@dataclass(frozen=True, kw_only=True)
class Commit:
    """One commit of a repository, which never changes, and the sizes of its files in bytes, by their paths; None for a
    size that a mirror does not tell."""

    name: HubName  # as it was asked for
    hash: str
    sizes: Mapping[str, int | None]


def resolve(name: HubName) -> Commit:
    """Asks the hub, once, which commit `name` is and what it holds."""
    with explained(name):
        info = HfApi(**_LIBRARY).model_info(name.repo, revision=name.revision, files_metadata=True)
    commit = info.sha or name.revision
    if not is_commit(commit):  # it becomes a part of paths
        raise DownloadError(
            f"what answers for the hub gives {commit!r:.100} as the commit of {name}, which is none; check HF_ENDPOINT"
        )
    sizes = {file.rfilename: file.size for file in info.siblings or ()}
    return Commit(name=name, hash=commit, sizes=sizes)


def missing_files(commit: Commit, files: Sequence[str], cache: Path) -> list[str]:
    snapshot = snapshot_dir(cache, commit.name.repo, commit.hash)
    return [file for file in files if not _is_whole(snapshot / file, commit.sizes[file])]


def fetch(commit: Commit, files: Sequence[str], cache: Path, what: str) -> Path:
    """Fetches those of `files` that the cache lacks; returns the snapshot's directory.

    Other processes may do the same at the same time: huggingface_hub locks each file. Raises `DownloadError` before
    the first byte if the disk is too small.
    """
    snapshot = snapshot_dir(cache, commit.name.repo, commit.hash)
    missing = missing_files(commit, files, cache)
    if not missing:
        return snapshot
    num_bytes = sum(commit.sizes[file] or 0 for file in missing)
    check_disk(cache, num_bytes, str(commit.name))
    plural = "" if len(missing) == 1 else "s"
    say(f"{commit.name} is commit {commit.hash}: {what}, {size(num_bytes)} in {len(missing)} file{plural}, to {cache}")
    with DownloadProgress(commit.name.repo, num_bytes) as progress, explained(commit.name):
        _fetch_all(missing, partial(_fetch_one, commit, cache, progress.bar_class()), progress)
    return snapshot


def check_disk(folder: Path, num_bytes: int, what: str) -> None:
    """Raises `DownloadError` if the disk of `folder`, which may not exist yet, has less room."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < num_bytes:
        raise DownloadError(
            f"{what} needs {size(num_bytes)} more on the disk of {folder}, which has {size(free)} free: free some "
            "(`jaxllm models ls` lists what is there), or give a directory on another disk with --download-dir"
        )


def _fetch_all(files: Sequence[str], fetch_one: Callable[[str], None], progress: DownloadProgress) -> None:
    pool = ThreadPoolExecutor(_WORKERS, thread_name_prefix="jaxllm-download")
    try:
        for future in as_completed([pool.submit(fetch_one, file) for file in files]):
            future.result()
    except BaseException:  # Ctrl-C too: the threads would go on to the end of their files
        progress.stop()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _fetch_one(commit: Commit, cache: Path, bar_class: Any, file: str) -> None:
    repo, want = commit.name.repo, commit.sizes[file]
    stored = snapshot_dir(cache, repo, commit.hash) / file
    if stored.is_file() and not _is_whole(stored, want):
        _discard(stored)
    # Without a token as argument, huggingface_hub finds the user's own.
    path = Path(hf_hub_download(repo, file, revision=commit.hash, cache_dir=cache, tqdm_class=bar_class, **_LIBRARY))
    if not _is_whole(path, want):
        have = path.stat().st_size
        _discard(path)
        raise DownloadError(
            f"{file} of {commit.name} came with {have} bytes in place of {want}, and was dropped; run the same command "
            "again, and if that doesn't help, try another mirror (HF_ENDPOINT)"
        )


def _is_whole(path: Path, num_bytes: int | None) -> bool:
    return path.is_file() and num_bytes in (None, path.stat().st_size)


def _discard(path: Path) -> None:
    """Removes a file of a snapshot, and what it links to."""
    path.resolve().unlink(missing_ok=True)
    path.unlink(missing_ok=True)
