"""The sampling parameters that a checkpoint recommends, in the form of a `generation_config.json`."""

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


def default_sampling_params(checkpoint: Checkpoint) -> SamplingParams:
    """The recommended values, with defaults for the others. `do_sample: false` becomes temperature 0.

    Raises `ModelFormatError` naming field and value if the file is damaged.
    """
    stored = checkpoint.generation_config()
    given = {ours: stored[theirs] for theirs, ours in _NAMES.items() if stored.get(theirs) is not None}
    if stored.get("do_sample") is False:
        given["temperature"] = 0.0
    try:
        return SamplingParams(**given)
    except ValueError as error:
        path = checkpoint.generation_path
        raise ModelFormatError(f"{path}: {error}. Correct the file, or pass sampling_params") from error
