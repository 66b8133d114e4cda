"""An LLM inference engine for people who live in JAX."""

import sys as _sys
from importlib import import_module as _import_module
from typing import TYPE_CHECKING

if _sys.platform == "win32":
    raise ImportError("jaxllm runs on Linux and macOS. On Windows use it in WSL2: wsl --install, then pip in its shell")

if TYPE_CHECKING:
    from jaxllm.async_llm import AsyncLLM
    from jaxllm.async_llm import AsyncLLM as AsyncLLMEngine
    from jaxllm.cluster.options import Cluster
    from jaxllm.engine_args import AsyncEngineArgs, EngineArgs
    from jaxllm.function_model import FunctionShape
    from jaxllm.llm import LLM
    from jaxllm.llm_engine import LLMEngine
    from jaxllm.outputs import BeamSearchOutput, CompletionOutput, Logprob, RequestOutput
    from jaxllm.pooling_outputs import (
        ClassificationOutput,
        ClassificationRequestOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        PoolingOutput,
        PoolingRequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from jaxllm.pooling_params import PoolingParams
    from jaxllm.rollout import Finish, Rollout
    from jaxllm.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
    from jaxllm.score_outputs import ContinuationScore, DocumentScore
    from jaxllm.structured_outputs import StructuredOutputs
    from jaxllm.text.prompts import TextPrompt, TokensPrompt

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchOutput",
    "BeamSearchParams",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "Cluster",
    "CompletionOutput",
    "ContinuationScore",
    "DocumentScore",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "Finish",
    "FunctionShape",
    "LLMEngine",
    "Logprob",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "RequestOutput",
    "RequestOutputKind",
    "Rollout",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StructuredOutputs",
    "TextPrompt",
    "TokensPrompt",
]

_HOMES = {
    "LLM": "llm",
    "AsyncEngineArgs": "engine_args",
    "AsyncLLM": "async_llm",
    "AsyncLLMEngine": "engine.async_llm_engine",
    "BeamSearchOutput": "outputs",
    "BeamSearchParams": "sampling_params",
    "ClassificationOutput": "pooling_outputs",
    "ClassificationRequestOutput": "pooling_outputs",
    "Cluster": "cluster.options",
    "CompletionOutput": "outputs",
    "ContinuationScore": "score_outputs",
    "DocumentScore": "score_outputs",
    "EmbeddingOutput": "pooling_outputs",
    "EmbeddingRequestOutput": "pooling_outputs",
    "EngineArgs": "engine_args",
    "Finish": "rollout",
    "FunctionShape": "function_model",
    "LLMEngine": "llm_engine",
    "Logprob": "outputs",
    "PoolingOutput": "pooling_outputs",
    "PoolingParams": "pooling_params",
    "PoolingRequestOutput": "pooling_outputs",
    "RequestOutput": "outputs",
    "RequestOutputKind": "sampling_params",
    "Rollout": "rollout",
    "SamplingParams": "sampling_params",
    "ScoringOutput": "pooling_outputs",
    "ScoringRequestOutput": "pooling_outputs",
    "StructuredOutputs": "structured_outputs",
    "TextPrompt": "text.prompts",
    "TokensPrompt": "text.prompts",
}


def __getattr__(name: str):
    """Loads public names on first use, so that commands which need no jax start without it."""
    if name == "__version__":
        return _version()
    if name not in _HOMES:
        from jaxllm.from_vllm.names import missing

        raise missing("jaxllm", name, __all__)
    return getattr(_import_module(f"jaxllm.{_HOMES[name]}"), name)


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("jaxllm")
    except metadata.PackageNotFoundError:
        return "unknown"  # a checkout that is not installed
