"""A model of transformers that the caller has in memory, as a checkpoint. torch is the caller's: it is never imported
here."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.checkpoint.tensors import StoredTensor
from jaxllm.text.tokenizer import Tokenizer

_DTYPES = {  # torch's names -> those of safetensors
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int8": "I8",
    "uint8": "U8",
    "int32": "I32",
    "int64": "I64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}


def is_torch_model(model: Any) -> bool:
    """Whether it is a module of torch with a configuration of transformers."""
    torch = sys.modules.get("torch")
    return (
        torch is not None and isinstance(model, torch.nn.Module) and hasattr(getattr(model, "config", None), "to_dict")
    )


class TorchModel:
    """The checkpoint of `model`, whose tensors are read where they lie."""

    config_name = "configuration"

    def __init__(self, model: Any):
        self._model = model
        self.path = Path(f"<{type(model).__name__}>")  # of errors
        self.config_path, self.generation_path = self.path / "config", self.path / "generation_config"

    def config(self) -> dict[str, Any]:
        found = json.loads(self._model.config.to_json_string(use_diff=False))
        return found | {"architectures": [type(self._model).__name__]}

    def config_bytes(self) -> bytes:
        return json.dumps(self.config(), sort_keys=True).encode()

    def generation_config(self) -> dict[str, Any]:
        given = getattr(self._model, "generation_config", None)
        return {} if given is None else json.loads(given.to_json_string(use_diff=False))

    def tensors(self) -> Mapping[str, StoredTensor]:
        return {name: self._tensor(name, value) for name, value in self._model.state_dict().items()}

    def tokenizer(self) -> Tokenizer:
        raise ValueError(
            f"a {type(self._model).__name__} has no tokenizer; pass tokenizer=, or skip_tokenizer_init=True"
        )

    def _tensor(self, name: str, value: Any) -> StoredTensor:
        dtype = str(value.dtype).removeprefix("torch.")
        shape = tuple(value.shape)
        return StoredTensor(self.path, name, _DTYPES.get(dtype, dtype), shape, 0, data=_Bytes(value))


class _Bytes:
    """The bytes of a tensor, made when they are read: it may lie on an accelerator, or not in one piece."""

    def __init__(self, tensor: Any):
        self._tensor = tensor

    def read(self, start: int, num_bytes: int) -> np.ndarray:
        torch = sys.modules["torch"]
        flat = self._tensor.detach().to("cpu").contiguous().reshape(-1)
        return flat.view(torch.uint8).numpy()[start : start + num_bytes]
