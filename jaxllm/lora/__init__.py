"""vLLM's home of LoRA adapters, which are not there."""
