"""What every reader of a quantised format makes of the tensors of one module."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxllm.checkpoint.tensors import StoredTensor
from jaxllm.models.quantized import WeightForm


class StoredWeight(NamedTuple):
    """A module's weight in host memory: `w[o, order[i]] = (codes[o, i] * scales[o, i // group] + offsets) * outer[o]`,
    in float32, each operation rounded. Without groups there is one scale an output."""

    codes: np.ndarray  # [out, in], of the form's dtype, each in a byte; of a module without a form the float32 weight
    scales: np.ndarray  # [out, in // group], or [out]
    offsets: np.ndarray | None = None  # float32 [out, in // group]
    outer: np.ndarray | None = None  # float32 [out]
    order: np.ndarray | None = None  # int32 [in]


@dataclass(frozen=True)
class QuantizedModule:
    """A module whose weight is quantised, found in the headers of files."""

    name: str  # "model.layers.0.self_attn.q_proj"
    shape: tuple[int, int]  # outputs, inputs
    form: WeightForm | None  # None: no form has these codes, and the weight is read as float32, its scales as 1
    tensors: tuple[StoredTensor, ...]  # all that it is made of
    read: Callable[[], StoredWeight]  # ModelFormatError for values that no weight has: scales that are NaN, say
