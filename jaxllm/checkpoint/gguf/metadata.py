"""The metadata of a GGUF file: values by key, with checks of their types."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.errors import ModelFormatError

_MISSING = object()


class Metadata:
    """Read-only. Each method takes a key and what to return if there is no such key; without that a missing key is a
    `ModelFormatError`, as is a value of another type."""

    def __init__(self, file: Path, values: Mapping[str, Any]):
        self.file, self._values = file, values

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def __iter__(self):
        return iter(self._values)

    def is_array(self, key: str) -> bool:
        return isinstance(self._values.get(key), np.ndarray | list)

    def text(self, key: str, default: Any = _MISSING) -> Any:
        return self._get(key, default, str, "a string")

    def flag(self, key: str, default: Any = _MISSING) -> Any:
        return self._get(key, default, bool, "a boolean")

    def integer(self, key: str, default: Any = _MISSING) -> Any:
        """An int; of an array for each layer the one value that all have."""
        value = self._get(key, default, int | np.ndarray, "an integer")
        if isinstance(value, np.ndarray):
            if value.dtype.kind not in "iu" or len(set(value.tolist())) != 1:
                raise self.error(key, "must be an integer, the same for all layers")
            return value.tolist()[0]
        if isinstance(value, bool):
            raise self.error(key, "must be an integer")
        return value

    def number(self, key: str, default: Any = _MISSING) -> Any:
        """A float or int."""
        value = self._get(key, default, float | int, "a number")
        if isinstance(value, bool):
            raise self.error(key, "must be a number")
        return value

    def token(self, key: str, default: Any = _MISSING) -> Any:
        """A token's id; -1, which some files write for none, is the default."""
        value = self.integer(key, default)
        return default if value in (-1, 2**32 - 1) else value

    def strings(self, key: str, default: Any = _MISSING) -> Any:
        return self._get(key, default, list, "an array of strings")

    def numbers(self, key: str, default: Any = _MISSING) -> Any:
        """An array of numbers, `[n]`."""
        return self._get(key, default, np.ndarray, "an array of numbers")

    def error(self, key: str, what: str) -> ModelFormatError:
        value = self._values.get(key)
        shown = repr(value[:8].tolist() if isinstance(value, np.ndarray) else value)
        return ModelFormatError(
            f"{self.file}: {key}={shown:.100} {what}; download the file again, or convert the model again"
        )

    def _get(self, key: str, default: Any, kind: Any, described: str) -> Any:
        value = self._values.get(key, default)
        if value is _MISSING:
            raise ModelFormatError(f"{self.file} lacks the key {key}; take a file that holds the whole model")
        if key in self._values and not isinstance(value, kind):
            raise self.error(key, f"must be {described}")
        return value
