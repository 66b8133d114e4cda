"""A GGUF file as a checkpoint: the interface of `jaxllm.checkpoint.formats`."""

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.checkpoint.gguf.architectures import ROPE_TENSORS, hugging_face_tensors
from jaxllm.checkpoint.gguf.blocks import dequantize
from jaxllm.checkpoint.gguf.config import architecture_of, hugging_face_config
from jaxllm.checkpoint.gguf.metadata import Metadata
from jaxllm.checkpoint.gguf.reader import read_gguf
from jaxllm.checkpoint.gguf.tokenizer import read_tokenizer
from jaxllm.checkpoint.tensors import StoredTensor
from jaxllm.errors import ModelFormatError
from jaxllm.text.tokenizer import Tokenizer

_MAX_VECTOR = 2**12  # values of a tensor that is read as configuration


class GgufCheckpoint:
    """A `Checkpoint` of one file, or of several of which `path` is the first."""

    config_name = "metadata"

    def __init__(self, path: Path):
        self.path = self.config_path = self.generation_path = path

    @cached_property
    def _content(self) -> tuple[Metadata, dict[str, StoredTensor]]:
        return read_gguf(self.path)

    def config(self) -> dict[str, Any]:
        metadata, tensors = self._content
        return hugging_face_config(metadata, tensors, self._vector)

    def config_bytes(self) -> bytes:
        return json.dumps(self.config(), sort_keys=True).encode()

    def generation_config(self) -> dict[str, Any]:
        return {}

    def tensors(self) -> Mapping[str, StoredTensor]:
        metadata, tensors = self._content
        architecture, found = architecture_of(metadata), {}
        for tensor in tensors.values():
            if tensor.name in ROPE_TENSORS:
                continue
            named = hugging_face_tensors(architecture, tensor)
            if not named:
                raise ModelFormatError(
                    f"{tensor.file}: the tensor {tensor.name!r:.100} is unknown in a model of general.architecture="
                    f"{metadata.text('general.architecture')!r}; this variant is not supported"
                )
            if twice := named.keys() & found.keys():
                raise ModelFormatError(f"{tensor.file}: two tensors are {min(twice)}; convert the model again")
            found |= named
        return found

    def tokenizer(self) -> Tokenizer:
        return read_tokenizer(self._content[0])

    def save_beside_weights(self, folder: Path) -> None:
        """Writes what there is of a tokenizer to a directory in Hugging Face format."""
        if "tokenizer.ggml.model" in self._content[0]:
            self.tokenizer().save(folder)

    def _vector(self, name: str) -> np.ndarray:
        tensor = self._content[1].get(name)
        if tensor is None:
            raise ModelFormatError(f"{self.path} lacks the tensor {name}, but has its counterpart; download it again")
        if len(tensor.shape) != 1 or tensor.shape[0] > _MAX_VECTOR:
            raise ModelFormatError(
                f"{tensor.file}: {name} has shape {list(tensor.shape)}; it must be a vector of at most {_MAX_VECTOR}"
            )
        with tensor.file.open("rb") as stream:
            stream.seek(tensor.offset)
            data = stream.read(tensor.num_bytes)
        return dequantize(tensor.dtype, np.frombuffer(data, np.uint8))
