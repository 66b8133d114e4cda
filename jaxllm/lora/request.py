"""vLLM's home of `LoRARequest`."""

from jaxllm.from_vllm.names import absent

__getattr__ = absent("jaxllm.lora.request")
