"""vLLM's home of `AsyncLLM`."""

from jaxllm.async_llm import AsyncLLM as AsyncLLM
