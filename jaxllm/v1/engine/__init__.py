"""Names of vLLM's."""
