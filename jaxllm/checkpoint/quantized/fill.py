"""Puts quantised modules, as their files hold them, into the arrays of the products that have them."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from einops import rearrange

from jaxllm.checkpoint.fill import WeightPart
from jaxllm.checkpoint.quantized.module import QuantizedModule, Region, StoredWeight
from jaxllm.checkpoint.window import HostArray, Needed
from jaxllm.models.quantized import WeightForm

_GROUP = "in_group"  # an axis in patterns: of the inputs that share a scale
_Indices = np.ndarray | slice


class ModulePart(NamedTuple):
    """A module, or some rows of one, and its place in a product's dense weight or a table."""

    module: QuantizedModule
    part: WeightPart

    def read(self, group: int | None = None) -> StoredWeight:
        """The outputs and inputs of the module that the part has. With `group`, so many neighbours among the inputs get
        a scale of their own, which divide those that share one in the file.

        Of a window little more is read than that: whole units of the module."""
        module, part, first_row = self.module, self.part, self.part.first_row
        if part.whole is None:
            return _taken(module.read(), slice(first_row, first_row + part.shape[0]), slice(None), group)
        unit = module.unit or module.shape
        rows, columns = (_indices(axes) for axes in part.file_box)
        rows += first_row
        spans = _in_units(rows, unit[0], module.shape[0])
        inputs = _in_units(np.arange(columns[0], columns[-1] + 1), unit[1], module.shape[1])[0]
        read = [module.read(Region(outputs, inputs)) for outputs in spans]
        stored = read[0] if len(read) == 1 else _concatenated(read)
        first = np.concatenate([np.arange(span.start, span.stop) for span in spans])
        return _taken(stored, _as_slice(np.searchsorted(first, rows)), _as_slice(columns - inputs.start), group)


def stored_bytes(sources: Sequence[ModulePart]) -> int:
    """What these take in files, about: of a module that is read in windows its share of outputs and inputs."""
    shares: dict[str, float] = {}
    for module, part in sources:
        share = 1.0 if part.whole is None else math.prod(part.shape) / math.prod(module.shape)
        shares[module.name] = min(1.0, shares.get(module.name, 0.0) + share)
    sizes = {module.name: sum(tensor.num_bytes for tensor in module.tensors) for module, _ in sources}
    return sum(int(share * sizes[name]) for name, share in shares.items())


def fill_table(hosts: Mapping[str, HostArray], source: ModulePart) -> None:
    """Puts some rows of a module into the arrays of a `QuantizedEmbedding` in host memory, by name."""
    rows, stored = source.part.place[0], source.read()
    for name in ("codes", "scales", "offsets", "outer"):
        values = getattr(stored, name)
        if values is not None:
            values = values[:, None] if name == "scales" and values.ndim == 1 else values
            hosts[name].at((rows, *(slice(0, size) for size in values.shape[1:])))[...] = values


def _indices(axes: Sequence[tuple[int, slice]]) -> np.ndarray:
    """Of what these parts of axes, which have these sizes, are together."""
    found = np.zeros(1, np.int64)
    for size, part in axes:
        found = (found[:, None] * size + np.arange(part.start, part.stop)).reshape(-1)
    return found


def _in_units(indices: np.ndarray, unit: int, size: int) -> list[slice]:
    """The spans of whole units that have all `indices`, which are in order."""
    units = np.unique(indices // unit)
    runs = np.split(units, np.flatnonzero(np.diff(units) != 1) + 1)
    return [slice(int(run[0]) * unit, min(size, (int(run[-1]) + 1) * unit)) for run in runs]


def _as_slice(indices: np.ndarray) -> _Indices:
    """A slice if it can be one, which copies nothing."""
    first, last = int(indices[0]), int(indices[-1])
    return slice(first, last + 1) if last - first + 1 == len(indices) else indices


def _concatenated(read: Sequence[StoredWeight]) -> StoredWeight:
    """Outputs that are read one after the other."""
    first = read[0]
    fields = {name: [getattr(one, name) for one in read] for name in ("codes", "scales", "offsets", "outer")}
    joined = {name: np.concatenate(values) for name, values in fields.items() if values[0] is not None}
    return first._replace(**joined)


def _taken(stored: StoredWeight, rows: _Indices, columns: _Indices, group: int | None) -> StoredWeight:
    codes, scales, offsets = stored.codes[rows][:, columns], stored.scales[rows], stored.offsets
    offsets = None if offsets is None else offsets[rows]
    if group is not None:
        times = stored.codes.shape[1] // scales.shape[1] // group
        is_whole = isinstance(columns, slice) and columns == slice(None)
        groups = columns if is_whole else np.arange(stored.codes.shape[1])[columns][::group] // group
        scales = np.repeat(scales, times, axis=1)[:, groups]
        offsets = None if offsets is None else np.repeat(offsets, times, axis=1)[:, groups]
    outer = None if stored.outer is None else stored.outer[rows]
    return StoredWeight(codes, scales, offsets, outer, stored.order)


class ProductPart(NamedTuple):
    """A module's part of a product's dense weight, which has these axes of inputs after those of experts."""

    part: WeightPart
    num_inputs: int
    num_experts: int = 0  # one or none

    def windows(self, needed: Needed, form: WeightForm | None) -> list[WeightPart]:
        """What has to be there so that `needed` is, of the product's codes or, without a form, of its dense weight."""
        group = None if form is None or form.group is None else needed.shape[self.num_experts + self.num_inputs]
        if form is None:
            axes = self._axes
        elif group is None:
            axes = self._experts + self._outputs + self._inputs
        else:
            axes = (*self._experts, *self._inputs, _GROUP, *self._outputs)
        places = self._places(group)
        windows = []
        for box in needed.of(tuple(places[axis] for axis in axes)):
            found = dict(zip(axes, box, strict=True))
            if group is not None:
                inner = found[self._inputs[-1]]
                found[self._inputs[-1]] = slice(inner.start * group, inner.stop * group)
            windows.append(self.part.within(tuple(found[axis] for axis in self._axes)))
        return windows

    def fill(self, hosts: Mapping[str, HostArray], module: QuantizedModule) -> None:
        """Reads the module, and puts its arrays into their places in the product's in host memory, by name."""
        left, _ = self.part.axes.split("->")
        if module.form is not None and module.form.group is not None:
            group = hosts["codes"].windows[0].values.shape[self.num_experts + self.num_inputs]
            stored = ModulePart(module, self.part).read(group)
            self._fill_groups(hosts, stored, group)
        else:
            stored = ModulePart(module, self.part).read()
            if module.form is None:
                self._put(hosts["weight"], stored.codes, left, self._axes)
            else:
                self._put(hosts["codes"], stored.codes, left, self._experts + self._outputs + self._inputs)
                self._put(hosts["scales"], stored.scales, self._left_outputs, self._experts + self._outputs)
        if stored.outer is not None:
            self._put(hosts["outer"], stored.outer, self._left_outputs, self._experts + self._outputs)
        if stored.order is not None:
            hosts["order"].at((slice(0, len(stored.order)),))[...] = stored.order

    def _fill_groups(self, hosts: Mapping[str, HostArray], stored: StoredWeight, group: int) -> None:
        inner = self._inputs[-1]
        left, _ = self.part.axes.split("->")
        split = f"{inner} {_GROUP}" if left.endswith(") ") else f"({inner} {_GROUP})"
        left = re.sub(rf"\b{inner}\b", split, left)
        right = (*self._experts, *self._inputs, _GROUP, *self._outputs)
        self._put(hosts["codes"], stored.codes, left, right, group)
        for name, values in (("scales", stored.scales), ("offsets", stored.offsets)):
            if values is not None:
                self._put(hosts[name], values, left, right, group, scales_of_one=True)

    def _put(
        self,
        host: HostArray,
        values: np.ndarray,
        left: str,
        right: tuple[str, ...],
        group: int | None = None,
        *,
        scales_of_one: bool = False,
    ) -> None:
        places = self._places(group)
        if scales_of_one:
            places[_GROUP] = slice(0, 1)
        place = tuple(places[axis] for axis in right)
        sizes = {axis: part.stop - part.start for axis, part in zip(right, place, strict=True)}
        host.at(place)[...] = rearrange(values, f"{left} -> {' '.join(right)}", **sizes)

    def _places(self, group: int | None) -> dict[str, slice]:
        """From where to where the part is on each axis; with a group, the innermost of the inputs is counted in
        those."""
        places = dict(zip(self._axes, self.part.place, strict=True))
        if group is not None:
            inner = places[self._inputs[-1]]
            places[self._inputs[-1]] = slice(inner.start // group, inner.stop // group)
            places[_GROUP] = slice(0, group)
        return places

    @property
    def _axes(self) -> tuple[str, ...]:
        return tuple(self.part.axes.split("->")[1].split())

    @property
    def _experts(self) -> tuple[str, ...]:
        return self._axes[: self.num_experts]

    @property
    def _inputs(self) -> tuple[str, ...]:
        return self._axes[self.num_experts : self.num_experts + self.num_inputs]

    @property
    def _outputs(self) -> tuple[str, ...]:
        return self._axes[self.num_experts + self.num_inputs :]

    @property
    def _left_outputs(self) -> str:
        """What the rows of a module are."""
        return re.findall(r"\([^)]*\)|\w+", self.part.axes.split("->")[0])[0]
