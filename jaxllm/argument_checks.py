"""Checks of users' values. All raise `ValueError` naming the field, its value and the allowed range."""

import operator
from collections.abc import Iterable, Mapping
from typing import Any


def a_type(value: Any) -> str:
    """What messages call a value of another type than wanted: "an int"."""
    name = type(value).__qualname__
    return "None" if value is None else f"{'an' if name[0] in 'aeioAEIO' else 'a'} {name}"


def plain_number(value: Any) -> Any:
    """The `int` or `float` that a number of another library is: NumPy's, JAX's. Anything else comes back as it is."""
    if isinstance(value, bool | str | bytes) or getattr(value, "ndim", 0) or _is_bool(value):
        return value
    if hasattr(type(value), "__index__"):
        try:
            return operator.index(value)
        except TypeError:  # an array of floats has the method too
            pass
    return float(value) if hasattr(type(value), "__float__") else value


def _is_bool(value: Any) -> bool:
    return getattr(getattr(value, "dtype", None), "kind", None) == "b"


def as_list(name: str, value: Any) -> list:
    """A list, a tuple or an array as a list; None as an empty one."""
    if getattr(value, "ndim", None) == 1:
        value = value.tolist()
    if not isinstance(value, list | tuple | None):
        raise ValueError(f"{name}={value!r} must be a list")
    return list(value or ())


def as_ids(name: str, value: Any) -> list[int] | None:
    """Token ids without repeats. The engine, which knows the vocabulary, checks the upper bound."""
    if value is None:
        return None
    ids = [token if type(token) is int else plain_number(token) for token in as_list(name, value)]
    for token in ids:
        check_int(name, token, 0, 2**31 - 1)
    return list(dict.fromkeys(ids))


def as_bias(value: Any, most: int) -> dict[int, float]:
    """Token id -> bias, of at most `most` tokens. Keys may be strings of digits, as in JSON."""
    if not isinstance(value, Mapping | None):
        raise ValueError(f"logit_bias={value!r} must be a dict of token ids and numbers")
    if len(value or ()) > most:
        raise ValueError(
            f"logit_bias has {len(value or ())} tokens; at most {most} are allowed. To forbid more, give "
            "allowed_token_ids"
        )
    bias = {}
    for key, number in (value or {}).items():
        token = int(key) if isinstance(key, str) and key.isdecimal() else plain_number(key)
        number = plain_number(number)
        check_int("logit_bias key", token, 0, 2**31 - 1)
        check_float(f"logit_bias[{token}]", number, -100.0, 100.0)
        bias[token] = float(number)
    return bias


def check_words(name: str, given: Any, words: Any, most: int) -> None:
    if len(words) > most:
        raise ValueError(f"{name} has {len(words)} strings; at most {most} are allowed")
    if not all(isinstance(word, str) and word for word in words):
        raise ValueError(f"{name}={given!r} must hold non-empty strings")


def nests_deeper(value: Any, most: int) -> bool:
    """Whether `value`, made of dicts, lists and tuples, has more than `most` levels. It never recurses."""
    level, depth = [value], 0
    while level and depth <= most:
        depth += 1
        level = [inner for outer in level for inner in _children(outer)]
    return depth > most


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list | tuple) else ()


def flag(name: str, value: Any, *, default: bool = False) -> bool:
    """`value`, NumPy's too; None: the default."""
    if not isinstance(value, bool | None) and not _is_bool(value):
        raise ValueError(f"{name}={value!r:.100} must be True or False")
    return default if value is None else bool(value)


def check_int(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{name}={value!r:.100} must be an integer in [{low}, {high}]")


def check_float(name: str, value: Any, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:  # NaN is not
        raise ValueError(f"{name}={value!r:.100} must be a finite number in [{low:g}, {high:g}]")


def some_of(names: list[str]) -> str:
    """The first few, and how many more there are."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return (", ".join(names[:5]) or "none") + more
