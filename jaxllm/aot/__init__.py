"""Compiles the engine's executables for TPUs and GPUs that are not here, and reports memory, time and traffic."""
