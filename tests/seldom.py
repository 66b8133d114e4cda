"""Cases that say little that others don't: `pytest` leaves them out, CI runs them with all that is slow."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def all_but(often: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """The parameters of a test: `cases`, of which those that aren't among `often` are slow. A case is a tuple where a
    test has several parameters."""
    cases = list(cases)
    assert set(often) <= set(cases), f"not among the cases: {set(often) - set(cases)}"
    return [case if case in often else _slow(case) for case in cases]


def _slow(case: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
