"""What a name of the hub asks for, in the cache: a checkpoint's snapshot, complete, or a GGUF file."""

import logging
from pathlib import Path

from huggingface_hub import constants

from jaxllm.hub import files
from jaxllm.hub.cache import describe, find_complete, list_models, remember
from jaxllm.hub.download import Commit, fetch, missing_files, resolve
from jaxllm.hub.explain import HubUnreachable, not_cached
from jaxllm.hub.names import HubName

log = logging.getLogger(__name__)


def find_or_fetch(name: HubName, cache: Path, *, weights: bool, tokenizer: bool) -> Path:
    """The snapshot's directory, or the file. A commit that is there already costs no request, a branch one."""
    there = find_complete(cache, name)
    if there is not None and name.is_pinned:
        return there
    if constants.HF_HUB_OFFLINE:
        if there is None:
            raise not_cached(name, cache, describe(list_models(cache, name.repo)))
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
        remember(cache, name, commit.hash)
    return path


def _fetch(commit: Commit, cache: Path, weights: bool, tokenizer: bool) -> Path:
    name = commit.name
    if name.file is not None:
        return fetch(commit, files.gguf_files(name, commit.sizes), cache, "a GGUF model") / name.file
    snapshot = fetch(commit, files.config_files(name, commit.sizes), cache, "configuration and tokenizer")
    wanted = files.weight_files(snapshot)
    files.check_holds(name, commit.sizes, wanted)
    if weights and missing_files(commit, wanted, cache):
        _check_supported(snapshot, tokenizer)
        fetch(commit, wanted, cache, "weights")
    return snapshot


def _check_supported(snapshot: Path, tokenizer: bool) -> None:
    """Raises `ModelFormatError` for what could not be served, before its weights are fetched."""
    from jaxllm.checkpoint.config import read_config, resolve_dtype  # imports jax, which the cache does not need
    from jaxllm.text.tokenizer import Tokenizer

    read_config(snapshot, resolve_dtype("auto", "cpu"))
    if tokenizer:
        Tokenizer.from_dir(snapshot)
