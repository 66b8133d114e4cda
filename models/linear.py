"""Products with weights. A `Linear` owns its weight, bias, adapter and the choice of its kernel; its members (queries,
keys and values; gate and up) lie side by side on one output axis. Other forms of a weight are classes with its call."""

import math
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from jaxllm.models.context import StepContext
from jaxllm.pallas_kernels import grouped_matmul, matmul
from jaxllm.pallas_kernels.gated import gated, gated_product

Sizes = tuple[tuple[str, int], ...]  # names and sizes, in order


def param(rngs: nnx.Rngs, dtype: Any, *, fan_in: int, **dims: int) -> nnx.Param:
    """A random weight whose keyword names are its logical axes: `param(rngs, dtype, fan_in=D, embed=D, mlp=F)`."""
    shape = tuple(dims.values())
    value = jax.random.normal(rngs.params(), shape, jnp.float32) / math.sqrt(fan_in)
    return nnx.Param(value.astype(dtype), axes=tuple(dims))


@dataclass(frozen=True, kw_only=True)
class LinearShape:
    """The axes of a product, as names and sizes: it sums over `inputs`, and its result has `outputs`.

    `members` lie one after the other on the output axis `axis`. `experts` have a weight each, and stand before the
    inputs of x, the outputs of the result, and all axes of the weight.
    """

    inputs: Sizes
    outputs: Sizes
    axis: str | None = None
    members: Sizes = ()
    experts: int | None = None
    places: tuple[tuple[int, int], ...] = ()  # of a product's part: from where to where its members lie on that's axis

    def __post_init__(self) -> None:
        names = [name for name, _ in self.inputs + self.outputs]
        if len(set(names)) < len(names):
            raise ValueError(f"the axes {names} of a product must have different names, as each is sharded by its own")

    @property
    def equation(self) -> str:
        """Of the product, without its experts, as `jnp.einsum` takes it."""
        letters = string.ascii_lowercase
        summed, kept = letters[: len(self.inputs)], letters[len(self.inputs) :][: len(self.outputs)]
        return f"...{summed},{summed}{kept}->...{kept}"

    @property
    def weight_axes(self) -> dict[str, int]:
        return self._experts | dict(self.inputs) | dict(self.outputs)

    @property
    def bias_axes(self) -> dict[str, int]:
        return self._experts | dict(self.outputs)

    @property
    def _experts(self) -> dict[str, int]:
        return {} if self.experts is None else {"experts": self.experts}

    @property
    def member_dim(self) -> int:
        """Where the members lie, counted from the end, in results and weights."""
        return [name for name, _ in self.outputs].index(self.axis or "") - len(self.outputs)

    def slice_of(self, member: str) -> slice:
        """Its part of the members' axis."""
        names, sizes = zip(*self.members, strict=True)
        ends = [0, *accumulate(sizes)]
        at = names.index(member)
        return slice(ends[at], ends[at + 1])

    @property
    def part_of(self) -> tuple[int, tuple[tuple[int, int], ...]] | None:
        """The members' axis of a weight, from the end, and the `places` there; None for a product that is no part."""
        return (self.member_dim, self.places) if self.places else None

    def take(self, x: Array, member: str) -> Array:
        """Its part of a result or of a weight."""
        part = self.slice_of(member)
        return jax.lax.slice_in_dim(x, part.start, part.stop, axis=self.member_dim)

    def part(self, names: Sequence[str]) -> "LinearShape":
        """Of a product that has these members alone."""
        members = tuple((name, size) for name, size in self.members if name in names)
        total = sum(size for _, size in members)
        outputs = tuple((name, total if name == self.axis else size) for name, size in self.outputs)
        slices = [self.slice_of(name) for name, _ in members]
        return replace(self, outputs=outputs, members=members, places=tuple((x.start, x.stop) for x in slices))

    def product(
        self, x: Float[Array, "..."], weight: Float[Array, "..."], ctx: StepContext, out_dtype: Any = None
    ) -> Float[Array, "..."]:
        """`x[..., *inputs]` times a dense `weight`; with experts `x[..., experts or 1, *inputs]`, each its own.

        The result has the dtype of `x`; with `out_dtype` float32 it is not rounded from the float32 sums.
        """
        equation = self.equation
        if self.experts is None:
            return matmul.einsum(
                equation, x, weight, out_dtype=out_dtype, num_tokens=ctx.num_tokens, placement=ctx.placement
            )
        axis = x.ndim - len(self.inputs) - 1
        shared = x.shape[axis] == 1
        each = jax.vmap(
            lambda x, weight: matmul.einsum(equation, x, weight, out_dtype=out_dtype),  # XLA has batched products
            in_axes=(None if shared else axis, 0),
            out_axes=axis,
        )
        return each(jnp.squeeze(x, axis) if shared else x, weight)


class Linear(nnx.Module):
    """`x @ weight + bias`, for any number of input and output axes.

    A class of another form overrides `product`. `adapter`, if it is set, is called with x, the result and the step's
    context, and returns the result that it makes of it.
    """

    def __init__(self, shape: LinearShape, weight: nnx.Param, bias: nnx.Param | None = None):
        self.weight = weight
        self._own(shape, bias)

    def _own(self, shape: LinearShape, bias: nnx.Param | None) -> None:
        self.shape, self.bias, self.adapter = shape, bias, nnx.data(None)

    @classmethod
    def random(
        cls,
        inputs: Mapping[str, int],
        outputs: Mapping[str, int | Mapping[str, int]],
        *,
        bias: bool = False,
        experts: int | None = None,
        dtype: Any,
        rngs: nnx.Rngs,
    ) -> "Linear":
        """With random weights, and zeros as bias. An output axis that members share has their sizes by name:
        `{"kv_heads": 2, "qkv": {"q": 4, "k": 1, "v": 1}, "head_dim": 64}`."""
        axis, members = next(((n, sizes) for n, sizes in outputs.items() if isinstance(sizes, Mapping)), (None, {}))
        sizes = {n: sum(size.values()) if isinstance(size, Mapping) else size for n, size in outputs.items()}
        shape = LinearShape(
            inputs=tuple(inputs.items()),
            outputs=tuple(sizes.items()),
            axis=axis,
            members=tuple(members.items()),
            experts=experts,
        )
        weight = param(rngs, dtype, fan_in=math.prod(inputs.values()), **shape.weight_axes)
        axes = shape.bias_axes
        zeros = nnx.Param(jnp.zeros(tuple(axes.values()), dtype), axes=tuple(axes)) if bias else None
        return cls(shape, weight, zeros)

    def part(self, names: Sequence[str]) -> "Linear":
        """A product of these members alone, without bias."""
        shape, weight = self.shape.part(names), self.weight[...]
        parts = [self.shape.take(weight, name) for name, _ in shape.members]
        value = jnp.concatenate(parts, axis=self.shape.member_dim)
        return Linear(shape, nnx.Param(value, axes=tuple(shape.weight_axes)))

    def columns(self, ids: Int[Array, " n"]) -> Float[Array, "*inputs n"]:
        """The weight of these entries of a single output axis, in float32."""
        return self.weight[...][..., ids].astype(jnp.float32)

    def product(self, x: Float[Array, "..."], ctx: StepContext, out_dtype: Any = None) -> Float[Array, "..."]:
        """Without bias and adapter."""
        if self.is_intercepted:
            return jnp.einsum(self.shape.equation, x, self.weight[...], preferred_element_type=out_dtype)
        return self.shape.product(x, self.weight[...], ctx, out_dtype)

    @property
    def is_intercepted(self) -> bool:
        """Whether Qwix has wrapped the model. While it is called, `jnp.einsum` is Qwix's own, which knows a weight that
        it has quantised, or adds a low-rank one: no kernel may go before it, and no reshape."""
        return hasattr(self, "qwix_path") and self.shape.experts is None

    def __call__(self, x: Float[Array, "..."], ctx: StepContext, *, out_dtype: Any = None) -> Float[Array, "..."]:
        """`x[..., *inputs]` to `[..., *outputs]`, in the dtype of x or, not rounded to it, in `out_dtype`."""
        y = self.product(x, ctx, out_dtype)
        if self.bias is not None:
            y = ctx.rounded_once(jnp.add, y, jnp.broadcast_to(self.bias[...].astype(y.dtype), y.shape))
        return y if self.adapter is None else self.adapter(x, y, ctx)

    def gated(self, x: Float[Array, "*t d"], activation: str, ctx: StepContext) -> Float[Array, "*t width"]:
        """Where the members are a gate and what it is for: the `activation` of the first times the second."""
        options = {"num_tokens": ctx.num_tokens, "placement": ctx.placement}
        kind = type(self)
        is_ours = kind.product is Linear.product and kind.__call__ is Linear.__call__
        is_plain = is_ours and self.bias is None and self.adapter is None
        if is_plain and not self.is_intercepted and self.shape.experts is None:
            return gated_product(x, self.weight[...], activation, **options)
        return gated(self(x, ctx), activation, **options)

    def grouped(
        self, x: Float[Array, "rows ..."], offsets: Int[Array, " experts_plus_1"], ctx: StepContext
    ) -> Float[Array, "rows ..."]:
        """Of experts: rows `offsets[e]:offsets[e + 1]` of `x[rows, *inputs]` times the weight of expert e; rows of none
        come out as zeros. On several devices it is called within `shard_map`, with the weights of each alone."""
        y = self.grouped_product(x, offsets, ctx)
        if self.bias is None:
            return y
        row = jnp.arange(len(x), dtype=jnp.int32)
        expert = jnp.searchsorted(offsets, row, side="right", method="compare_all") - 1
        bias = self.bias[...].astype(y.dtype).at[expert].get(mode="clip")
        is_owned = (expert >= 0) & (expert < len(offsets) - 1)
        return y + jnp.where(jnp.expand_dims(is_owned, range(1, y.ndim)), bias, jnp.zeros((), y.dtype))

    def grouped_product(
        self, x: Float[Array, "rows ..."], offsets: Int[Array, " experts_plus_1"], ctx: StepContext
    ) -> Float[Array, "rows ..."]:
        """Without bias."""
        options = {"num_inputs": len(self.shape.inputs), "placement": ctx.placement}
        return grouped_matmul.product(x, self._held, offsets, **options)

    @property
    def _held(self) -> Any:
        """The weight as products take it."""
        return self.weight[...]


def of_every_expert(
    product: Callable[[Array, Array], Array], x: Float[Array, "..."], num_inputs: int, experts: int
) -> Float[Array, "..."]:
    """`x[..., experts or 1, *inputs]` with the weight of each expert, by `product`, which takes rows and the offsets of
    the experts'."""
    axis = x.ndim - num_inputs - 1
    x = jnp.moveaxis(jnp.repeat(x, experts, axis) if x.shape[axis] == 1 else x, axis, 0)
    rows = x.reshape(-1, *x.shape[axis + 1 :])
    y = product(rows, jnp.arange(experts + 1, dtype=jnp.int32) * jnp.int32(len(rows) // experts))
    return jnp.moveaxis(y.reshape(*x.shape[: axis + 1], *y.shape[1:]), 0, axis)


class Joined(Linear):
    """Members of several forms: each of `parts` multiplies those it has, and the results are put in order."""

    def __init__(self, shape: LinearShape, parts: Sequence[Linear], bias: nnx.Param | None = None):
        self.parts = nnx.List(parts)
        self._own(shape, bias)

    def product(self, x: Float[Array, "..."], ctx: StepContext, out_dtype: Any = None) -> Float[Array, "..."]:
        results = [(part.shape, part(x, ctx, out_dtype=out_dtype)) for part in self.parts]
        members = {name: shape.take(y, name) for shape, y in results for name, _ in shape.members}
        return self._in_order(members)

    def grouped_product(
        self, x: Float[Array, "rows ..."], offsets: Int[Array, " experts_plus_1"], ctx: StepContext
    ) -> Float[Array, "rows ..."]:
        results = [(part.shape, part.grouped(x, offsets, ctx)) for part in self.parts]
        return self._in_order({name: shape.take(y, name) for shape, y in results for name, _ in shape.members})

    def _in_order(self, members: Mapping[str, Array]) -> Array:
        return jnp.concatenate([members[name] for name, _ in self.shape.members], axis=self.shape.member_dim)


def joined(linear: Linear, parts: Sequence[Linear]) -> Linear:
    """`parts`, which have all members of `linear` together, in its place: one of all members is the product itself."""
    if len(parts) == 1:
        parts[0].bias = linear.bias
        return parts[0]
    return Joined(linear.shape, parts, linear.bias)


def with_forms(linear: Linear, forms: Mapping[str, Callable[[Linear], Linear]]) -> Linear:
    """`linear` with each member in its form, which makes one of a dense one: members of equal forms stay one
    product."""
    groups: dict[Callable[[Linear], Linear], list[str]] = {}
    for name, _ in linear.shape.members:
        groups.setdefault(forms[name], []).append(name)
    parts = [form(linear.part(names)) for form, names in groups.items()]
    return Joined(linear.shape, parts, linear.bias)


class Embedding(nnx.Module):
    """A table of vectors, `weight[rows, width]`: looked up by row and, where the head is tied to it, the head."""

    def __init__(self, weight: nnx.Param, dtype: Any = None):
        self.weight, self.dtype = weight, dtype  # of what is looked up; None: that of the weight

    @classmethod
    def random(cls, rows: Mapping[str, int], width: Mapping[str, int], *, dtype: Any, rngs: nnx.Rngs) -> "Embedding":
        """`rows` and `width` are an axis each: `{"vocab": 32000}`, `{"embed": 4096}`."""
        return cls(param(rngs, dtype, fan_in=math.prod(width.values()), **rows, **width))

    def __call__(self, ids: Int[Array, "*t"]) -> Float[Array, "*t width"]:
        found = self.weight[...].at[ids].get(out_sharding=_rows_sharding(ids))
        return found if self.dtype is None else found.astype(self.dtype)

    def rows(self, ids: Int[Array, "*t"]) -> Float[Array, "*t width"]:
        """In float32."""
        return self(ids).astype(jnp.float32)

    def logits(self, hidden: Float[Array, "*t width"], ctx: StepContext) -> Float[Array, "*t rows"]:
        """The product with each row, as float32 sums."""
        options = {"num_tokens": ctx.num_tokens, "placement": ctx.placement}
        return matmul.einsum("...d,vd->...v", hidden, self.weight[...], out_dtype=jnp.float32, **options)


def _rows_sharding(ids: Array) -> NamedSharding | None:
    """Of what is looked up for `ids`, in the caller's program with explicit axes; elsewhere the compiler chooses."""
    found = jax.typeof(ids).sharding
    if not found.mesh.explicit_axes:
        return None
    return NamedSharding(found.mesh, PartitionSpec(*found.spec, None))
