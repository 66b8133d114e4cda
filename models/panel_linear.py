"""Products with dense weights that lie in panels, in the order in which a lone CPU reads them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from jaxllm.models.context import StepContext
from jaxllm.models.linear import Linear, of_every_expert
from jaxllm.pallas_kernels.gated import native as of_gates
from jaxllm.pallas_kernels.matmul import panels
from jaxllm.pallas_kernels.matmul.native import DTYPES
from jaxllm.sharding.expand import Empty, Expansion
from jaxllm.sharding.rules import Axes


@dataclass(frozen=True, kw_only=True)
class InPanels(Expansion):
    """Of the weight of a product, whose inputs and outputs are `inputs` and `outputs` together, and whose axes are
    `names` before."""

    names: Axes
    inputs: int
    outputs: int
    dtype: Any
    experts: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return *self._lead, *panels.panels_shape(self.inputs, self.outputs, self.dtype)

    @property
    def _lead(self) -> tuple[int, ...]:
        return () if self.experts is None else (self.experts,)

    @property
    def axes(self) -> Axes:
        names = "panel", *(None for _ in self.shape[len(self._lead) + 1 :])
        return names if self.experts is None else ("experts", *names)

    def sources(self, index: tuple[slice, ...]) -> list[tuple[slice, ...]]:
        return [tuple(slice(0, size) for size in self.canonical)]

    def shard(self, x: np.ndarray, index: tuple[slice, ...], origin: Sequence[int], empty: Empty) -> np.ndarray:
        return self.of_whole(x, empty)

    def of_whole(self, x: np.ndarray, empty: Empty) -> np.ndarray:
        """What the canonical array expands to."""
        made = empty(self.shape, x.dtype)
        panels.put_in_panels(x.reshape(*self._lead, self.inputs, self.outputs), made)
        return made

    def contract(self, x: Any) -> Any:
        return panels.from_panels(x).reshape(self.canonical)

    def canonical_axes(self, axes: Axes) -> Axes:
        return self.names

    def canonical_sharding(self, axes: Axes, mesh: Mesh) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec())


class PanelLinear(Linear):
    """A product whose `weight` is what `InPanels` makes of it."""

    @classmethod
    def of(cls, linear: Linear) -> "PanelLinear":
        """The abstract `linear`, which `fits`."""
        weight, shape = linear.weight, linear.shape
        value, inputs, outputs = weight.get_value(), _size(shape.inputs), _size(shape.outputs)
        sizes = {"inputs": inputs, "outputs": outputs, "experts": shape.experts}
        how = InPanels(canonical=value.shape, names=tuple(weight.axes), dtype=value.dtype, **sizes)
        metadata = weight.get_metadata() | {"axes": how.axes, "expansion": how}
        made = cls(shape, nnx.Param(jax.ShapeDtypeStruct(how.shape, value.dtype), **metadata), linear.bias)
        made.adapter = linear.adapter
        return made

    def columns(self, ids: Int[Array, " n"]) -> Float[Array, "*inputs n"]:
        return panels.columns(self.weight[...], ids).reshape(*dict(self.shape.inputs).values(), len(ids))

    def product(self, x: Float[Array, "..."], ctx: StepContext, out_dtype: Any = None) -> Float[Array, "..."]:
        num_inputs, experts = len(self.shape.inputs), self.shape.experts
        if experts is None:
            about = {"num_tokens": ctx.num_tokens, "batch_invariant": ctx.placement.batch_invariant}
            options = {"num_inputs": num_inputs, "outputs": self._outputs, "out_dtype": out_dtype}
            return panels.panel_product(x, self.weight[...], **options, **about)
        about = {"panels": self.weight[...], "outputs": self._outputs, "out_dtype": out_dtype}

        def grouped(rows: Array, offsets: Array) -> Array:
            return panels.grouped_panel_product(rows, offsets=offsets, **about)

        return of_every_expert(grouped, x, num_inputs, experts)

    def gated(self, x: Float[Array, "*t d"], activation: str, ctx: StepContext) -> Float[Array, "*t width"]:
        is_plain = self.bias is None and self.adapter is None and self.shape.experts is None
        are_whole = self.shape.outputs[-1][1] % panels.PANEL == 0  # those of the gate
        if is_plain and are_whole and of_gates.supports(x, activation, self.weight[...]):
            about = {"num_tokens": ctx.num_tokens, "batch_invariant": ctx.placement.batch_invariant}
            return of_gates.gated_panel_product(x, self.weight[...], activation, **about)
        return super().gated(x, activation, ctx)

    def grouped_product(
        self, x: Float[Array, "rows ..."], offsets: Int[Array, " experts_plus_1"], ctx: StepContext
    ) -> Float[Array, "rows ..."]:
        return panels.grouped_panel_product(x, self.weight[...], offsets, outputs=self._outputs)

    @property
    def _outputs(self) -> tuple[int, ...]:
        return tuple(dict(self.shape.outputs).values())


def put_in_panels(model: nnx.Module, dtype: Any) -> None:
    """Puts the weights of dense products of the abstract `model`, which computes in `dtype`, in panels, in place, where
    they fit."""
    for _, node in list(nnx.iter_graph(model)):
        for key, child in list(vars(node).items()) if isinstance(node, nnx.Module) else ():
            if type(child) is Linear and fits(child, dtype):
                setattr(node, key, PanelLinear.of(child))


def fits(linear: Linear, dtype: Any) -> bool:
    """Whether its weight can lie in panels, and rows of `dtype` be multiplied with it there."""
    shape, held = linear.shape, linear.weight.get_value().dtype
    can_multiply = (jnp.dtype(dtype).name, held.name) in DTYPES
    return can_multiply and panels.fits(_size(shape.inputs), _size(shape.outputs), held)


def _size(axes: Sequence[tuple[str, int]]) -> int:
    return math.prod(size for _, size in axes)
