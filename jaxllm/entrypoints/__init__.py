"""vLLM's home of what programs begin with."""
