"""The sampling parameters that a checkpoint recommends, in the form of a `generation_config.json`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxllm.checkpoint.files import read_json
from jaxllm.checkpoint.formats import Checkpoint
from jaxllm.errors import ModelFormatError
from jaxllm.sampling_params import SamplingParams

_NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def default_sampling_params(
    checkpoint: Checkpoint | None, source: str | Path = "auto", overrides: Mapping[str, Any] | None = None
) -> SamplingParams:
    """The recommended values, with defaults for the others. `do_sample: false` becomes temperature 0.

    `source` is "auto" for the checkpoint's, "vllm" for none, or a directory with the file; `overrides` go before what
    it says. Raises `ModelFormatError` naming field and value if the file is damaged, and `ValueError` for `overrides`.
    """
    path = Path(source) / "generation_config.json"
    if source == "auto":
        stored = {} if checkpoint is None else checkpoint.generation_config()
        path = path if checkpoint is None else checkpoint.generation_path
    else:
        stored = {} if source == "vllm" else read_json(path)
    own = _overridden(overrides)
    given = {ours: stored[theirs] for theirs, ours in _NAMES.items() if stored.get(theirs) is not None}
    if stored.get("do_sample") is False:
        given["temperature"] = 0.0
    try:
        params = SamplingParams(**given)
    except ValueError as error:
        raise ModelFormatError(f"{path}: {error}. Correct the file, or pass sampling_params") from error
    return SamplingParams(**given | own) if own else params


def _overridden(overrides: Mapping[str, Any] | None) -> dict[str, Any]:
    """The fields of `SamplingParams` that `override_generation_config` gives. ValueError for a name of no field."""
    names = _NAMES | {"max_tokens": "max_tokens"}
    if unknown := [name for name in overrides or () if name not in names]:
        raise ValueError(f"override_generation_config has no {unknown[0]!r}; it may have {', '.join(names)}")
    return {names[name]: value for name, value in (overrides or {}).items()}
