"""vLLM's home of small helpers."""

import uuid


def random_uuid() -> str:
    """32 hexadecimal digits."""
    return uuid.uuid4().hex
