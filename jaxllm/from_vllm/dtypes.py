"""Names of dtypes, of what people give as one."""

from typing import Any

import numpy as np

_ALIASES = {"half": "float16", "float": "float32", "bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def dtype_name(dtype: Any) -> str:
    """The name of a dtype of JAX, NumPy or torch, or of a name of vLLM's. What is none comes back as text, to be
    refused where names are known."""
    if dtype is None:  # for NumPy, which calls it float64
        return "None"
    if isinstance(dtype, str):
        return _ALIASES.get(dtype, dtype)
    if type(dtype).__module__ == "torch":
        return str(dtype).removeprefix("torch.")
    try:
        return np.dtype(dtype).name
    except TypeError:
        return str(dtype)


_KV_ALIASES = {"fp8_e4m3": "fp8", "float8_e4m3fn": "fp8", "None": "auto"}


def kv_dtype_name(dtype: Any) -> str:
    """Likewise, of a KV cache's."""
    name = dtype_name(dtype)
    return _KV_ALIASES.get(name, name)


_TASKS = {"auto": None, "embedding": "embed", "score": "classify", "reward": "classify"}


def task_name(given: str | None) -> str | None:
    """Our name of a model's task; what is unknown is refused where models are known."""
    return _TASKS.get(given, given) if isinstance(given, str) else given
