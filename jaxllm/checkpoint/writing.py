"""Writes model directories: safetensors in files of bounded size, and a directory that is there whole or not at all."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from jaxllm.checkpoint.files import WEIGHTS, WEIGHTS_INDEX


def check_is_new(out: Path) -> None:
    """Raises `ValueError` if `out` is anything but an empty directory, or nothing."""
    if os.path.lexists(out) and not (out.is_dir() and not any(out.iterdir())):
        raise ValueError(f"{out} exists and is not an empty directory; give a new one, or remove it")


@contextmanager
def whole_directory(out: Path) -> Iterator[Path]:
    """A temporary directory that is renamed to `out` on success and removed on failure."""
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        yield folder
        mask = os.umask(0)
        os.umask(mask)
        folder.chmod(0o777 & ~mask)  # as mkdir would have made it
        folder.rename(out)
    except BaseException:
        shutil.rmtree(folder)
        raise


class FileShards:
    """Writes files of at most so many bytes, unless a tensor is larger, and holds one of them in memory."""

    def __init__(self, folder: Path, max_bytes: int):
        self._folder, self._max_bytes = folder, max_bytes
        self._pending: dict[str, np.ndarray] = {}
        self._files: list[list[str]] = []
        self._num_bytes = 0

    def add_all(self, tensors: Iterable[tuple[str, np.ndarray]]) -> None:
        for name, array in tensors:
            if self._pending and sum(x.nbytes for x in self._pending.values()) + array.nbytes > self._max_bytes:
                self._flush()
            self._pending[name] = array

    def finish(self) -> tuple[int, int]:
        """Bytes and number of the files."""
        self._flush()
        count = len(self._files)
        files = [WEIGHTS] if count == 1 else [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
        for i, file in enumerate(files):
            (self._folder / f"part-{i}").rename(self._folder / file)
        if count > 1:
            places = {name: file for file, names in zip(files, self._files, strict=True) for name in names}
            index = {"metadata": {"total_size": self._num_bytes}, "weight_map": dict(sorted(places.items()))}
            (self._folder / WEIGHTS_INDEX).write_text(json.dumps(index, indent=2) + "\n")
        return self._num_bytes, count

    def _flush(self) -> None:
        file = self._folder / f"part-{len(self._files)}"
        file.touch()  # with the permissions that other files have
        mode = file.stat().st_mode
        save_file(self._pending, file, metadata={"format": "pt"})
        file.chmod(mode)
        self._files.append(list(self._pending))
        self._num_bytes += sum(x.nbytes for x in self._pending.values())
        self._pending = {}
