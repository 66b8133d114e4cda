"""vLLM's home of `LLM`."""

from jaxllm.llm import LLM as LLM
