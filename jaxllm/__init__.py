"""An LLM inference engine for people who live in JAX."""

import sys as _sys
from importlib import import_module as _import_module
from typing import TYPE_CHECKING

if _sys.platform == "win32":
    raise ImportError("jaxllm runs on Linux and macOS. On Windows use it in WSL2: wsl --install, then pip in its shell")

if TYPE_CHECKING:
    from jaxllm.async_llm import AsyncLLM
    from jaxllm.llm import LLM
    from jaxllm.outputs import BeamSearchOutput, CompletionOutput, Logprob, RequestOutput
    from jaxllm.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
    from jaxllm.structured_outputs import StructuredOutputs
    from jaxllm.text.prompts import TextPrompt, TokensPrompt

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
    "TextPrompt": "text.prompts",
    "TokensPrompt": "text.prompts",
}


def __getattr__(name: str):
    """Loads public names on first use, so that commands which need no jax start without it."""
    if name == "__version__":
        return _version()
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxllm' has no attribute {name!r}")
    return getattr(_import_module(f"jaxllm.{_HOMES[name]}"), name)


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("jaxllm")
    except metadata.PackageNotFoundError:
        return "unknown"  # a checkout that is not installed
