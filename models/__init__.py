"""Models, and what is used of them by name."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxllm.models.comparison import check

__all__ = ["check"]

_HOMES = {"check": "comparison"}


def __getattr__(name: str) -> Any:
    """Loads on first use: the files of architectures are imported one by one."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_import_module(f"{__name__}.{_HOMES[name]}"), name)
