"""An LLM inference engine for people who live in JAX."""

from importlib import import_module as _import_module
from pathlib import Path as _Path
from typing import TYPE_CHECKING

# A checkout keeps models/, sharding/ and pallas_kernels/ beside this folder, a wheel inside it.
_root = _Path(__file__).parents[1]
if (_root / "pyproject.toml").is_file():
    __path__.append(str(_root))

if TYPE_CHECKING:
    from jaxllm.async_llm import AsyncLLM
    from jaxllm.llm import LLM
    from jaxllm.outputs import BeamSearchOutput, CompletionOutput, Logprob, RequestOutput
    from jaxllm.prompts import TextPrompt, TokensPrompt
    from jaxllm.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
    from jaxllm.structured_outputs import StructuredOutputs

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "CompletionOutput",
    "Logprob",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputs",
    "TextPrompt",
    "TokensPrompt",
]

_HOMES = {
    "LLM": "llm",
    "AsyncLLM": "async_llm",
    "BeamSearchOutput": "outputs",
    "BeamSearchParams": "sampling_params",
    "CompletionOutput": "outputs",
    "Logprob": "outputs",
    "RequestOutput": "outputs",
    "RequestOutputKind": "sampling_params",
    "SamplingParams": "sampling_params",
    "StructuredOutputs": "structured_outputs",
    "TextPrompt": "prompts",
    "TokensPrompt": "prompts",
}


def __getattr__(name: str):
    """Loads public names on first use, so that commands which need no jax start without it."""
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxllm' has no attribute {name!r}")
    return getattr(_import_module(f"jaxllm.{_HOMES[name]}"), name)
