"""vLLM's home of `LLMEngine`."""

from jaxllm.llm_engine import LLMEngine as LLMEngine
