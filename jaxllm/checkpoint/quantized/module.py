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


class Region(NamedTuple):
    """A part of a module's weight."""

    outputs: slice
    inputs: slice

    @classmethod
    def whole(cls, shape: tuple[int, int]) -> "Region":
        return cls(slice(0, shape[0]), slice(0, shape[1]))

    @property
    def shape(self) -> tuple[int, int]:
        return self.outputs.stop - self.outputs.start, self.inputs.stop - self.inputs.start


def per(part: slice, values: int, units: int = 1) -> slice:
    """The units that hold this part of values, of which `values` take `units`, and in which it begins with one."""
    return slice(part.start * units // values, -(-part.stop * units // values))


@dataclass(frozen=True)
class QuantizedModule:
    """A module whose weight is quantised, found in the headers of files."""

    name: str  # "model.layers.0.self_attn.q_proj"
    shape: tuple[int, int]  # outputs, inputs
    form: WeightForm | None  # None: no form has these codes, and the weight is read as float32, its scales as 1
    tensors: tuple[StoredTensor, ...]  # all that it is made of
    reader: Callable[[Region], StoredWeight]
    # Outputs and inputs whose multiples are where a region can begin and end; None: only the whole can be read.
    unit: tuple[int, int] | None = None

    def read(self, region: Region | None = None) -> StoredWeight:
        """The whole, or a region. ModelFormatError for values that no weight has: scales that are NaN, say."""
        return self.reader(region or Region.whole(self.shape))
