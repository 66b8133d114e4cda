"""Puts quantised modules, as their files hold them, into the arrays of the products that have them."""

import re
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from einops import rearrange

from jaxllm.checkpoint.fill import WeightPart
from jaxllm.checkpoint.quantized.module import StoredWeight

_GROUP = "in_group"  # an axis in patterns: of the inputs that share a scale


def fill_table(hosts: Mapping[str, np.ndarray], part: WeightPart, stored: StoredWeight) -> None:
    """Puts a module's rows into the arrays of a `QuantizedEmbedding` in host memory, by name."""
    rows = slice(part.first_row, part.first_row + part.shape[0])
    for name in ("codes", "scales", "offsets", "outer"):
        values = getattr(stored, name)
        if values is not None:
            hosts[name][...] = values[rows].reshape(hosts[name].shape)


class QuantizedFilling(NamedTuple):
    """The arrays of a product in host memory, by name, and a module that fills a part of them."""

    hosts: Mapping[str, np.ndarray]
    part: WeightPart
    num_inputs: int
    num_experts: int = 0  # axes of experts before the inputs: one or none

    def fill(self, stored: StoredWeight) -> None:
        """Puts the module's arrays, or those of its rows that belong here, into their places."""
        rows = slice(self.part.first_row, self.part.first_row + self.part.shape[0])
        left, _ = self.part.axes.split("->")
        if "weight" in self.hosts:  # of a form that no product has
            self._put("weight", stored.codes[rows], left, self._experts + self._inputs + self._outputs)
        elif stored.scales.ndim == 2:
            self._fill_groups(stored, rows)
        else:
            self._put("codes", stored.codes[rows], left, self._experts + self._outputs + self._inputs)
            self._put("scales", stored.scales[rows], self._left_outputs, self._experts + self._outputs)
        if stored.outer is not None:
            self._put("outer", stored.outer[rows], self._left_outputs, self._experts + self._outputs)
        if stored.order is not None:
            self.hosts["order"][...] = stored.order

    def _fill_groups(self, stored: StoredWeight, rows: slice) -> None:
        group = self.hosts["codes"].shape[
            self.num_experts + self.num_inputs
        ]  # a part of the module's, if devices or heads want that
        times = stored.codes.shape[1] // stored.scales.shape[1] // group
        inner = self._inputs[-1]
        left, _ = self.part.axes.split("->")
        split = f"{inner} {_GROUP}" if left.endswith(") ") else f"({inner} {_GROUP})"
        left = re.sub(rf"\b{inner}\b", split, left)
        sizes = self.part.sizes | {inner: self.part.sizes[inner] // group}
        right = (*self._experts, *self._inputs, _GROUP, *self._outputs)
        self._put("codes", stored.codes[rows], left, right, sizes | {_GROUP: group})
        for name, values in (("scales", stored.scales), ("offsets", stored.offsets)):
            if values is not None:
                self._put(name, np.repeat(values[rows], times, axis=1), left, right, sizes | {_GROUP: 1})

    def _put(
        self, name: str, values: np.ndarray, left: str, right: tuple[str, ...], sizes: dict[str, int] | None = None
    ) -> None:
        sizes = self.part.sizes if sizes is None else sizes
        places = dict(zip(self.part.axes.split("->")[1].split(), self.part.place, strict=True))
        used = {axis: size for axis, size in sizes.items() if axis in right}
        place = tuple(places.get(axis, slice(None)) for axis in right)
        self.hosts[name][place] = rearrange(values, f"{left} -> {' '.join(right)}", **used)

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
