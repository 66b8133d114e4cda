"""Products with quantised weights: the form that a checkpoint gives a weight, or that it is given while it loads, and
the `Linear` that has it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxllm.models.context import StepContext
from jaxllm.models.linear import Linear, LinearShape, of_every_expert
from jaxllm.pallas_kernels import quantized_matmul
from jaxllm.pallas_kernels.quantized_matmul import QuantizedWeight, panels
from jaxllm.pallas_kernels.quantized_matmul.panels import panels_shape
from jaxllm.sharding import rules

to_panels = jax.jit(panels.to_panels, static_argnames=("num_inputs", "scales", "has_experts"))
_LEAST_GROUP = 8  # of inputs with a scale of their own
GROUP_AXIS = "scale_group"  # of the inputs that share a scale
IN_PARTS = "int8_in_parts"  # how rows are rounded for products in panels


@dataclass(frozen=True, kw_only=True)
class WeightForm:
    """How the weight of a product is held. Equal forms of members multiply as one.

    `codes` and `scales` are names of dtypes, see `jaxllm.pallas_kernels.quantized_matmul.QuantizedWeight`. `group`
    neighbours among the inputs share a scale; None: all of them do, and each output has one.
    """

    codes: str  # "int8", "int4", "uint4", "float8_e4m3fn" or "float4_e2m1fn"
    group: int | None
    scales: str  # "float32", "bfloat16", "float16"; of groups also "float8_e4m3fn", "float8_e8m0fnu"
    has_offsets: bool = False  # only of groups
    offsets_as_scales: bool = False  # whether offsets are numbers of the scales' dtype, though they are held in float32
    has_outer: bool = False  # one more scale of each output
    is_reordered: bool = False  # the inputs are taken in an order of the weight's own
    # "int8" or "float8_e4m3fn": each row may be rounded to that, by its own scale; "int8_in_parts": by scales of parts.
    activations: str | None = None
    in_panels: bool = False  # in the order that a CPU reads: see `jaxllm.pallas_kernels.quantized_matmul.panels`

    def fitted(self, inner: int) -> "WeightForm":
        """With groups that divide `inner` inputs, which lie together: those of the weight, or parts of them.
        ValueError if they would be too small."""
        if self.group is None:
            return self
        group = math.gcd(self.group, inner)
        if group < min(_LEAST_GROUP, self.group):
            raise ValueError(f"groups of {self.group} inputs with a scale each don't divide {inner} inputs")
        return replace(self, group=group)

    def leaves(self, shape: LinearShape) -> dict[str, tuple[dict[str | None, int], Any]]:
        """The arrays of such a weight: their logical axes, with sizes, and dtypes. The innermost axis of the inputs is
        counted in groups, if there are some, and is split among devices as that."""
        experts = {} if shape.experts is None else {"experts": shape.experts}
        inputs, outputs = dict(shape.inputs), dict(shape.outputs)
        if self.in_panels:
            kind = {"codes": self.codes, "scales": self.scales, "has_offsets": self.has_offsets}
            depth, width = math.prod(inputs.values()), math.prod(outputs.values())
            axes: tuple[str | None, ...] = ("panel", GROUP_AXIS, "group_bytes")
            axes_of = dict(zip(axes, panels_shape(depth, width, group=self.group or depth, **kind), strict=True))
            return {"panels": (experts | axes_of, jnp.dtype(jnp.uint8))} | self._more(shape)
        found: dict[str, tuple[dict[str | None, int], Any]] = {}
        if self.group is None:
            found["codes"] = (experts | outputs | inputs, jnp.dtype(self.codes))
            found["scales"] = (experts | outputs, jnp.dtype(self.scales))
        else:
            inner = shape.inputs[-1][0]
            groups = experts | inputs | {inner: inputs[inner] // self.group}
            found["codes"] = (groups | {GROUP_AXIS: self.group} | outputs, jnp.dtype(self.codes))
            found["scales"] = (groups | {GROUP_AXIS: 1} | outputs, jnp.dtype(self.scales))
            if self.has_offsets:
                found["offsets"] = (found["scales"][0], jnp.dtype(jnp.float32))
        return found | self._more(shape)

    def _more(self, shape: LinearShape) -> dict[str, tuple[dict[str | None, int], Any]]:
        """What each layout has beside codes, scales and offsets."""
        found: dict[str, tuple[dict[str | None, int], Any]] = {}
        if self.has_outer:
            experts = {} if shape.experts is None else {"experts": shape.experts}
            found["outer"] = (experts | dict(shape.outputs), jnp.dtype(jnp.float32))
        if self.is_reordered:
            found["order"] = ({None: math.prod(dict(shape.inputs).values())}, jnp.dtype(jnp.int32))
        return found

    def to_panels(self, inputs: int) -> "WeightForm | None":
        """That in which a CPU reads such a weight of so many inputs fastest; None if it can't be given that."""
        scales = self.scales if not self.has_offsets or self.offsets_as_scales else "float32"
        if self.in_panels or not panels.fits(self.codes, self.group or inputs, scales):
            return None
        return replace(self, in_panels=True, scales=scales)


class QuantizedLinear(Linear):
    """A product whose weight has the form `form`, with its arrays as parameters."""

    def __init__(self, shape: LinearShape, form: WeightForm, leaves: Mapping[str, Any], bias: nnx.Param | None = None):
        self._own(shape, bias)
        self.hold(form, leaves)

    def hold(self, form: WeightForm, leaves: Mapping[str, Any]) -> None:
        """Takes these arrays, or their shapes, for its own."""
        self.form = form
        axes = {name: tuple(axes) for name, (axes, _) in form.leaves(self.shape).items()}

        def held(name: str) -> Any:
            return nnx.Param(leaves[name], axes=axes[name]) if name in axes else nnx.data(None)

        self.codes, self.scales, self.offsets = held("codes"), held("scales"), held("offsets")
        self.outer, self.order = held("outer"), held("order")
        self.panels = held("panels")
        # For those who quantise dense weights.
        shape, variable = self.shape, self.panels if form.in_panels else self.codes
        about = {"form": form, "num_inputs": len(shape.inputs), "has_experts": shape.experts is not None}
        variable.set_metadata(**about, part_of=shape.part_of, dense_shape=tuple(shape.weight_axes.values()))

    @classmethod
    def abstract(cls, linear: Linear, form: WeightForm) -> "QuantizedLinear":
        """Of shapes, in the place of `linear`. ValueError if the form's groups don't fit."""
        return cls.of_shapes(linear.shape, form, linear.bias)

    @classmethod
    def of_shapes(cls, shape: LinearShape, form: WeightForm, bias: nnx.Param | None = None) -> "QuantizedLinear":
        """Likewise, of a product without a weight so far."""
        form = form.fitted(shape.inputs[-1][1])
        return cls(shape, form, _shapes(shape, form), bias)

    @property
    def _in_panels(self) -> WeightForm | None:
        """The form that it has in panels; None if it can't lie in them."""
        return self.form.to_panels(math.prod(dict(self.shape.inputs).values()))

    @property
    def can_lie_in_panels(self) -> bool:
        """Whether a CPU's kernel has a faster order for it, and its rows may be rounded as that rounds them."""
        return self.form.activations == IN_PARTS and self._in_panels is not None

    def round_rows(self) -> None:
        """Lets rows be rounded as that kernel rounds them, if it can be had. The arrays are shapes so far."""
        if self._in_panels is not None:
            form = replace(self.form, activations=IN_PARTS)
            self.hold(form, _shapes(self.shape, form))

    def put_in_panels(self) -> None:
        """Its arrays, or their shapes."""
        form = self._in_panels
        assert form is not None
        if isinstance(self.codes.get_value(), jax.ShapeDtypeStruct):
            leaves: dict[str, Any] = _shapes(self.shape, form)
        else:
            options = {"scales": form.scales, "has_experts": self.shape.experts is not None}
            leaves = {"panels": to_panels(self._held, num_inputs=len(self.shape.inputs), **options)}
            leaves |= {name: getattr(self, name)[...] for name in form.leaves(self.shape) if name != "panels"}
        self.hold(form, leaves)

    def fit(self, inner: int) -> None:
        """Makes of abstract groups such as divide `inner` inputs."""
        form = self.form.fitted(inner)
        if form != self.form:
            self.hold(form, _shapes(self.shape, form))

    def product(self, x: Float[Array, "..."], ctx: StepContext, out_dtype: Any = None) -> Float[Array, "..."]:
        num_inputs = len(self.shape.inputs)
        if self.order is not None:
            rows, inputs = x.shape[: x.ndim - num_inputs], x.shape[x.ndim - num_inputs :]
            x = x.reshape(*rows, -1)[..., self.order[...]].reshape(*rows, *inputs)
        if self.shape.experts is None:
            if self.form.in_panels:
                options = {"num_inputs": num_inputs, "out_dtype": out_dtype, "num_tokens": ctx.num_tokens}
                return panels.panel_product(x, self.panels[...], **self._about_panels, **options)
            return self._product(x, self._held, ctx, out_dtype)
        if self.form.in_panels:
            about = self._about_panels | {"panels": self.panels[...], "out_dtype": out_dtype}

            def grouped(rows: Array, offsets: Array) -> Array:
                return panels.grouped_panel_product(rows, offsets=offsets, **about)

            return of_every_expert(grouped, x, num_inputs, self.shape.experts)
        axis = x.ndim - num_inputs - 1
        shared = x.shape[axis] == 1
        weight = self._held
        each = jax.vmap(
            lambda x, weight: quantized_matmul.product(x, weight, num_inputs=num_inputs, out_dtype=out_dtype),
            in_axes=(None if shared else axis, 0),
            out_axes=axis,
        )
        return each(jnp.squeeze(x, axis) if shared else x, weight)

    def grouped_product(
        self, x: Float[Array, "rows ..."], offsets: Int[Array, " experts_plus_1"], ctx: StepContext
    ) -> Float[Array, "rows ..."]:
        if not self.form.in_panels:
            return super().grouped_product(x, offsets, ctx)
        return panels.grouped_panel_product(x, self.panels[...], offsets, **self._about_panels)

    @property
    def _about_panels(self) -> dict[str, Any]:
        form, outer = self.form, None if self.outer is None else self.outer[...]
        about = {"codes": form.codes, "scales": form.scales, "has_offsets": form.has_offsets, "outer": outer}
        return about | {"outputs": tuple(dict(self.shape.outputs).values())}

    def columns(self, ids: Int[Array, " n"]) -> Float[Array, "*inputs n"]:
        axis = 0 if self.form.group is None else -1  # of the outputs
        if self.form.in_panels:
            about = {name: value for name, value in self._about_panels.items() if name != "outputs"}
            flat = panels.columns(self.panels[...], ids, **about)
            values = flat.reshape(*dict(self.shape.inputs).values(), len(ids))
        else:
            parts = {name: jnp.take(part, ids, axis) for name, part in self._held._asdict().items() if part is not None}
            values = QuantizedWeight(**parts).dense(len(self.shape.inputs))
        if self.order is None:
            return values
        flat = values.reshape(-1, len(ids))
        return jnp.zeros_like(flat).at[self.order[...]].set(flat).reshape(values.shape)

    @property
    def _held(self) -> QuantizedWeight:
        parts = {name: getattr(self, name) for name in QuantizedWeight._fields}
        return QuantizedWeight(**{name: part[...] for name, part in parts.items() if part is not None})

    def _product(self, x: Array, weight: QuantizedWeight, ctx: StepContext, out_dtype: Any) -> Array:
        """On a mesh where a kernel serves, which XLA can't divide, each device multiplies its part."""
        mesh, platform = ctx.placement.mesh, ctx.placement.platform
        on_mesh = mesh is not None and mesh.size > 1 and platform in quantized_matmul.OP.on_mesh
        inputs, outputs = (tuple(name for name, _ in sizes) for sizes in (self.shape.inputs, self.shape.outputs))
        summed = tuple(name for axis in inputs for name in rules.mesh_axes(axis, inputs, mesh)) if on_mesh else ()

        def multiply(x: Array, *arrays: Array) -> Array:
            y = quantized_matmul.product(
                x,
                QuantizedWeight(**dict(zip(present, arrays, strict=True))),
                num_inputs=len(inputs),
                out_dtype=jnp.float32 if summed else out_dtype,
                activations=self.form.activations,
                num_tokens=None if on_mesh else ctx.num_tokens,
                placement=ctx.placement,
            )
            return jax.lax.psum(y, summed).astype(out_dtype or x.dtype) if summed else y

        present = [name for name, array in weight._asdict().items() if array is not None]
        arrays = [array for array in weight if array is not None]
        if not on_mesh:
            return multiply(x, *arrays)
        axes = {name: tuple(axes) for name, (axes, _) in self.form.leaves(self.shape).items()}
        rows = (None,) * (x.ndim - len(inputs))
        in_axes = [rows + inputs, *(axes[name] for name in present)]
        (y,) = rules.shard_map(lambda *args: (multiply(*args),), mesh, in_axes, [rows + outputs])(x, *arrays)
        return y


def round_rows(model: nnx.Module) -> None:
    """Lets rows of the abstract `model` be rounded for all products that can lie in panels, in place."""
    for node in _products(model):
        node.round_rows()


def put_in_panels(model: nnx.Module) -> bool:
    """Puts the products in panels that can lie in them, in place. Returns whether there are some."""
    nodes = [node for node in _products(model) if node.can_lie_in_panels]
    for node in nodes:
        node.put_in_panels()
    return bool(nodes)


def _products(model: nnx.Module) -> list[QuantizedLinear]:
    return [node for _, node in nnx.iter_graph(model) if isinstance(node, QuantizedLinear)]


def _shapes(shape: LinearShape, form: WeightForm) -> dict[str, jax.ShapeDtypeStruct]:
    return {
        name: jax.ShapeDtypeStruct(tuple(axes.values()), dtype) for name, (axes, dtype) in form.leaves(shape).items()
    }
