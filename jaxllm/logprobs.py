"""vLLM's home of log-probabilities."""

from jaxllm.outputs import Logprob as Logprob
