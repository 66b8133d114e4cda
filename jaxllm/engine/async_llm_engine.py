"""vLLM's home of `AsyncLLMEngine`, which is `AsyncLLM` there too."""

from jaxllm.async_llm import AsyncLLM as AsyncLLMEngine

__all__ = ["AsyncLLMEngine"]
