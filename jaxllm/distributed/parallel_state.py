"""vLLM's home of process groups, which are not there."""

from jaxllm.from_vllm.names import absent

__getattr__ = absent("jaxllm.distributed.parallel_state")
