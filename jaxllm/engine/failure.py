"""Why the device failed, in words for who asked for it."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxllm.engine.config import EngineConfig
from jaxllm.engine.device.runner import Runner
from jaxllm.errors import EngineError

MAX_CHARS = 500
LACKS_PARAMS = (
    "The parameters were deleted, as a training step does that takes them donated; give the engine the new ones with "
    "update_params, or train on a copy"
)


def describe(error: Exception, runner: Runner) -> str:
    """The first line of what the device said; with what to do about it, where that is known."""
    text = str(error).strip().partition("\n")[0][:MAX_CHARS] or type(error).__name__
    if runner.lacks_params():
        return f"{text} {LACKS_PARAMS}"
    return text


def check_any(failure: Exception | None, outputs: Sequence[Any]) -> None:
    """Raises `EngineError` if all `outputs` failed, as every step does: for this `failure`."""
    if failure is not None and outputs and all(output.error for output in outputs):
        raise EngineError(f"every step failed: {outputs[0].error}") from failure


def check_rollout(failure: Exception | None, outputs: Mapping[int, Any]) -> None:
    """Raises `EngineError` if all `outputs`, by prompt, failed, whatever for: a loop would train on nothing."""
    check_any(failure, list(outputs.values()))
    if outputs and all(output.error for output in outputs.values()):
        first = outputs[min(outputs)].error
        raise EngineError(f"all {len(outputs)} prompts failed, the first because {first}; check the parameters")


def describe_state(error: Exception, config: EngineConfig) -> str:
    """As `describe`, for the pool and the slots, which were to be built."""
    text = str(error).strip()[:MAX_CHARS] or type(error).__name__
    if "RESOURCE_EXHAUSTED" not in text:
        return text
    return (
        f"{text.removesuffix('.')}. Lower num_blocks ({config.num_blocks}), max_num_seqs ({config.max_num_seqs}) or "
        f"max_num_batched_tokens ({config.max_num_batched_tokens}), or free memory of the device"
    )
