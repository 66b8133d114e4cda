"""The small model that `python -m jaxllm.generate` uses when it is given none."""
