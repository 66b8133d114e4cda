"""Progress bars."""

import sys
from collections.abc import Callable
from typing import Any

from tqdm import tqdm


def progress_bar(wanted: bool | Callable[..., Any], total: int, desc: str) -> Any:
    """As `wanted` makes it; or ours, which is none if it is False."""
    if callable(wanted):
        return wanted(total=total, desc=desc, unit="req")
    return tqdm(total=total, desc=desc, unit="req", disable=disabled() if wanted else True)


def disabled() -> bool | None:
    """tqdm's option for a bar in a terminal alone. None asks standard error, and fails if it is closed."""
    return True if sys.stderr is None else None
