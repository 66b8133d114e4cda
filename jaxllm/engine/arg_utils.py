"""vLLM's home of engine arguments."""

from jaxllm.engine_args import AsyncEngineArgs as AsyncEngineArgs
from jaxllm.engine_args import EngineArgs as EngineArgs
