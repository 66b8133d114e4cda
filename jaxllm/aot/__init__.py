"""Compiles the engine's executables for TPUs and GPUs that are not there, and reports what they will take."""
