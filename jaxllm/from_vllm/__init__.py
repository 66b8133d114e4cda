"""What programs written for vLLM say, and what it means here."""
