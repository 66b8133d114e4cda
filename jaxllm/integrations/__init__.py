"""jaxllm in other packages, which are imported here only: each module says what to install."""
