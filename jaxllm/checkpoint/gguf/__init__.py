"""GGUF files: llama.cpp's format, which holds configuration, tokenizer and (quantised) weights in one file."""
