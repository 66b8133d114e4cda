"""Models, and what is used of them by name: how they come from and go to trainers, and how they are compared."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxllm.interchange.load import load
    from jaxllm.interchange.save import save_hf
    from jaxllm.models.comparison import check
    from jaxllm.models.conversions import convert
    from jaxllm.models.served import token_logprobs

__all__ = ["check", "convert", "load", "save_hf", "token_logprobs"]

_HOMES = {
    "check": "jaxllm.models.comparison",
    "convert": "jaxllm.models.conversions",
    "load": "jaxllm.interchange.load",
    "save_hf": "jaxllm.interchange.save",
    "token_logprobs": "jaxllm.models.served",
}


def __getattr__(name: str) -> Any:
    """Loads on first use: the files of architectures are imported one by one."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
