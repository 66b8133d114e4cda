"""Files of a model directory: their names, JSON of bounded size, and what an index of shards may name."""

import json
import os
import re
from pathlib import Path, PureWindowsPath
from typing import Any

from jaxllm.argument_checks import a_type
from jaxllm.errors import ModelFormatError

CONFIG = "config.json"
WEIGHTS, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"

GGUF_PART = re.compile(r"(?P<model>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
MAX_GGUF_PARTS = 1000


def local(text: str | os.PathLike[str]) -> Path:
    """A path as it was typed, with a leading ~ expanded."""
    return Path(os.path.expanduser(text))


def check_no_pointer(file: Path) -> None:
    """Raises `ModelFormatError` for what git leaves in place of a large file where git-lfs is not installed."""
    try:
        with file.open("rb") as stream:
            start = stream.read(len(_LFS_POINTER))
    except OSError:  # whoever reads the file says so
        return
    if start == _LFS_POINTER:
        raise ModelFormatError(
            f"{file} is a pointer of git-lfs, not the file itself; run git lfs pull in {file.parent}, or give the "
            "model's name org/name, which fetches it"
        )


def gguf_parts(name: str) -> list[str]:
    """The names of the GGUF files that hold the model whose only or first file is `name`. Raises `ModelFormatError`
    for another part of a model."""
    match = GGUF_PART.fullmatch(name)
    if match is None:
        return [name]
    count = int(match["count"])
    if not 1 <= count <= MAX_GGUF_PARTS:
        raise ModelFormatError(f"{name} is one of {count} parts by its name; at most {MAX_GGUF_PARTS} are read")
    if int(match["number"]) != 1:
        first = f"{match['model']}-00001-of-{match['count']}.gguf"
        raise ModelFormatError(f"{name} is a part of a model; give the first one, {first}")
    return [f"{match['model']}-{i + 1:05}-of-{count:05}.gguf" for i in range(count)]


def is_gguf(path: Path) -> bool:
    """Whether `path` is that of a GGUF file, by its name."""
    return path.suffix.lower() == ".gguf" and not path.is_dir()


def read_json(path: Path, *, max_bytes: int = 10_000_000) -> dict[str, Any]:
    """Reads a JSON object from a file of at most `max_bytes`. Raises `ModelFormatError` for anything else."""
    value = _read_json(path, max_bytes)
    if not isinstance(value, dict):
        raise ModelFormatError(f"{path} holds {a_type(value)}, not a JSON object; download it again")
    return value


def read_json_list(path: Path, *, max_bytes: int = 1_000_000) -> list[Any]:
    """As `read_json`, of a list."""
    value = _read_json(path, max_bytes)
    if not isinstance(value, list):
        raise ModelFormatError(f"{path} holds {a_type(value)}, not a JSON list; download it again")
    return value


def _read_json(path: Path, max_bytes: int) -> Any:
    if not path.is_file():
        raise ModelFormatError(f"{path} is missing; take the whole model directory, in Hugging Face format")
    try:
        with path.open("rb") as file:
            text = file.read(max_bytes + 1)
    except OSError as error:
        raise ModelFormatError(f"{path} cannot be read ({error}); check its permissions") from error
    if len(text) > max_bytes:
        raise ModelFormatError(f"{path} has more than {max_bytes} bytes, more than any valid file: replace it")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        check_no_pointer(path)
        raise ModelFormatError(f"{path} is not valid JSON ({error}); download it again") from error


def shard_path(index: Path, name: str) -> Path:
    """The file `name` beside `index`, with the suffix of the files that the index is for: *.bin or *.safetensors.

    Raises `ModelFormatError` for a name that leads out of the directory, and for a file that is missing.
    """
    suffix = ".bin" if ".bin." in index.name else ".safetensors"
    # The Windows flavour knows all separators and drives. Links are allowed: Hugging Face's cache uses them.
    if PureWindowsPath(name).name != name or not name.endswith(suffix):
        raise ModelFormatError(f"{index} names {name!r:.100}; it must be a *{suffix} file beside it")
    if not (index.parent / name).is_file():
        raise ModelFormatError(f"{index.parent / name} is missing, but {index.name} names it; download it")
    return index.parent / name
