"""Names that programs import from vLLM and that are not there: why, and what to do."""

from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import Any

from jaxllm.from_vllm.engine_arguments import NO_LORA

_ONE_PROCESS = "one process drives all devices, so there are no process groups; llm.close() frees what an engine holds"
_GUIDED = "its name in vLLM is StructuredOutputsParams now, and here: from jaxllm.sampling_params import it"
_MODELS = "give LLM a Flax module with the interface of jaxllm.models, or a pair (configuration, parameter pytree)"

ABSENT: dict[str, str] = {  # name -> why, and the way
    **dict.fromkeys(("LoRARequest", "LoRAConfig"), NO_LORA),
    **dict.fromkeys(("GuidedDecodingParams", "GuidedDecodingRequest"), _GUIDED),
    **dict.fromkeys(
        (
            *("destroy_model_parallel", "destroy_distributed_environment", "cleanup_dist_env_and_memory"),
            *("init_distributed_environment", "initialize_model_parallel", "get_tensor_model_parallel_rank"),
            *("get_tensor_model_parallel_world_size", "get_world_group", "get_tp_group", "get_pp_group"),
        ),
        _ONE_PROCESS,
    ),
    "ModelRegistry": f"{_MODELS}; docs/adding_a_model.md says how a model is made",
    "initialize_ray_cluster": _ONE_PROCESS,
    "PromptType": "prompts are strings, lists of token ids, TextPrompt and TokensPrompt",
    "MultiModalDataDict": "only text is served: there are no images, sounds or videos yet",
    "SamplingType": "a request is greedy if its temperature is 0",
    "RepetitionDetectionParams": "give SamplingParams(repetition_penalty=...)",
    "FlatLogprobs": "log-probabilities are dicts, which are made when they are looked at",
}


def missing(module: str, name: str, known: Iterable[str]) -> Exception:
    """What a module's `__getattr__` raises: an `ImportError` that says why, for what programs import from vLLM, or an
    `AttributeError` that names what was probably meant."""
    if name in ABSENT:
        return ImportError(f"{module} has no {name}: {ABSENT[name]}")
    near = get_close_matches(name, list(known), 1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return AttributeError(f"module {module!r} has no attribute {name!r}{hint}")


def absent(module: str) -> Callable[[str], Any]:
    """The `__getattr__` of a module of vLLM's whose names are all missing."""

    def __getattr__(name: str) -> Any:
        raise missing(module, name, ABSENT)

    return __getattr__
