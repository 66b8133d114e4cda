"""Reads the sampling parameters that a model directory recommends in `generation_config.json`."""

from pathlib import Path

from jaxllm.checkpoint.files import read_json
from jaxllm.errors import ModelFormatError
from jaxllm.sampling_params import SamplingParams

FILE = "generation_config.json"
_NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def default_sampling_params(model_dir: Path) -> SamplingParams:
    """The recommended values, with defaults for the others. `do_sample: false` becomes temperature 0.

    Raises `ModelFormatError` naming field and value if the file is damaged.
    """
    path = model_dir / FILE
    stored = read_json(path) if path.is_file() else {}
    given = {ours: stored[theirs] for theirs, ours in _NAMES.items() if stored.get(theirs) is not None}
    if stored.get("do_sample") is False:
        given["temperature"] = 0.0
    try:
        return SamplingParams(**given)
    except ValueError as error:
        raise ModelFormatError(f"{path}: {error}. Correct the file, or pass sampling_params") from error
