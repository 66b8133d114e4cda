"""Directories that Orbax has written: which they are, and where in them the arrays lie. Needs neither JAX nor Orbax."""

from collections.abc import Iterator
from pathlib import Path

from jaxllm.errors import ModelFormatError

_ARRAYS, _STEP = "_METADATA", "_CHECKPOINT_METADATA"  # files that directories of arrays, and of items, have
_ITEMS = ("default", "params", "model", "state")  # of a step, the first that is there


def is_orbax(path: Path) -> bool:
    """Whether `path` is a directory that Orbax has written: of arrays, of a step, or of steps."""
    return path.is_dir() and ((path / _ARRAYS).is_file() or (path / _STEP).is_file() or any(_steps(path)))


def find_arrays(path: Path) -> Path:
    """The directory of arrays at `path`: itself, the item with parameters in it, or that of the last step."""
    steps = dict(_steps(path))
    folder = steps[max(steps)] if steps else path
    if (folder / _ARRAYS).is_file():
        return folder
    items = [item.name for item in sorted(folder.iterdir()) if (item / _ARRAYS).is_file()]
    if len(items) == 1:
        return folder / items[0]
    found = next((name for name in _ITEMS if name in items), None)
    if found is None:
        raise ModelFormatError(
            f"{folder} holds {', '.join(items) or 'no arrays'}; give the directory of the item with the model's "
            "parameters"
        )
    return folder / found


def _steps(path: Path) -> Iterator[tuple[int, Path]]:
    for step in path.iterdir():
        if step.name.isdecimal() and (step / _STEP).is_file():
            yield int(step.name), step
