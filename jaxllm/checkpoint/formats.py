"""What a model's files say, whatever their format: the seam between checkpoints and all that serve them."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from jaxllm.checkpoint.explain import not_a_checkpoint
from jaxllm.checkpoint.files import CONFIG, is_gguf, local, read_json
from jaxllm.checkpoint.gguf.checkpoint import GgufCheckpoint
from jaxllm.checkpoint.gguf.reader import models_in
from jaxllm.checkpoint.tensors import StoredTensor, find_tensors
from jaxllm.errors import ModelFormatError
from jaxllm.text.tokenizer import Tokenizer

_BESIDE_WEIGHTS = (  # a tokenizer's files, and the settings for generation
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


@runtime_checkable
class Checkpoint(Protocol):
    """The files of a model. Nothing is read before it is asked for; what can't be read is a `ModelFormatError`."""

    path: Path  # of the directory or file, by which the model can be found again
    config_path: Path  # the file that errors in the configuration name
    config_name: str  # what the configuration is called in errors: "config.json"
    generation_path: Path  # the file that errors in the generation configuration name

    def config(self) -> dict[str, Any]:
        """The content of its `config.json`, or what that of the same model would hold."""
        ...

    def config_bytes(self) -> bytes:
        """The same in each copy of the model, and others for another configuration."""
        ...

    def generation_config(self) -> dict[str, Any]:
        """The content of `generation_config.json`; empty if there is none."""
        ...

    def tensors(self) -> Mapping[str, StoredTensor]:
        """The tensors by their names in a Hugging Face checkpoint. Their data is not read."""
        ...

    def tokenizer(self) -> Tokenizer:
        """With the chat templates."""
        ...


class HuggingFaceDirectory:
    """A directory with `config.json`, `tokenizer.json` and `*.safetensors`."""

    config_name = CONFIG

    def __init__(self, path: Path):
        self.path = path
        self.config_path, self.generation_path = path / self.config_name, path / "generation_config.json"

    def config(self) -> dict[str, Any]:
        if not self.config_path.is_file():
            raise not_a_checkpoint(self.path)
        return read_json(self.config_path)

    def config_bytes(self) -> bytes:
        return self.config_path.read_bytes()

    def generation_config(self) -> dict[str, Any]:
        return read_json(self.generation_path) if self.generation_path.is_file() else {}

    def tensors(self) -> Mapping[str, StoredTensor]:
        return find_tensors(self.path)

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_dir(self.path)

    def save_beside_weights(self, folder: Path) -> None:
        """Writes what there is of a tokenizer, and of settings for generation, to another directory of this format."""
        for file in filter(Path.is_file, (self.path / name for name in _BESIDE_WEIGHTS)):
            shutil.copyfile(file, folder / file.name)


class GivenConfig(HuggingFaceDirectory):
    """The content of a `config.json` alone, in no directory."""

    def __init__(self, hf: Mapping[str, Any]):
        super().__init__(Path())
        self._hf = dict(hf)

    def config(self) -> dict[str, Any]:
        return dict(self._hf)

    def config_bytes(self) -> bytes:
        return json.dumps(self._hf, sort_keys=True).encode()

    def generation_config(self) -> dict[str, Any]:
        return {}


def open_checkpoint(path: str | os.PathLike[str]) -> HuggingFaceDirectory | GgufCheckpoint:
    """The checkpoint in a directory, or in a GGUF file (one in parts: the first). `ModelFormatError` for a directory
    with several GGUF models."""
    path = local(path)
    if is_gguf(path):
        return GgufCheckpoint(path)
    if path.is_dir() and not (path / HuggingFaceDirectory.config_name).exists():
        models = models_in(path)
        if len(models) == 1:
            return GgufCheckpoint(models[0])
        if models:
            names = ", ".join(file.name for file in models[:5])
            raise ModelFormatError(f"{path} holds {len(models)} GGUF models ({names}); give the path of one file")
    return HuggingFaceDirectory(path)
