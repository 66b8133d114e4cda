"""How tests have prompts pooled."""

from typing import Any

from jaxllm.checkpoint.pooling_config import PoolingConfig
from jaxllm.engine.pooling import Pooler


def pooler(*, width: int = 1, task: str = "embed", **config: Any) -> Pooler:
    """Of `PoolingConfig`'s fields, with what they are without a model's files."""
    fields = {"pooling": "last", "normalize": True, "max_length": 96} | config
    return Pooler(config=PoolingConfig(**fields), width=width, task=task)
