"""Tables of vectors in the forms of quantised weights: lookups of their rows, and heads that are tied to them."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxllm.models.context import StepContext
from jaxllm.models.linear import Embedding, LinearShape
from jaxllm.models.quantized import GROUP_AXIS, QuantizedLinear, WeightForm


class QuantizedEmbedding(Embedding):
    """A table whose rows are dequantised as they are looked up, each number rounded to `dtype`.

    Rows lie whole, as in files, with the scales of their groups: `codes[rows, width]`, `scales[rows, groups]`. Of a
    table in the layout of products, or of codes whose groups are an axis, a TPU would copy the whole for each lookup.
    So a tied head has the codes once more: `head`, the product with the table, in the layout that its kernels read.
    """

    def __init__(self, shape: LinearShape, form: WeightForm, leaves: Mapping[str, Any], dtype: Any):
        """`shape` is that of the product with all rows: inputs are their width, outputs the rows."""
        self.shape, self.form, self.dtype = shape, form, dtype
        axes = {name: tuple(sizes) for name, (sizes, _) in _leaves(shape, form).items()}

        def held(name: str) -> Any:
            return nnx.Param(leaves[name], axes=axes[name]) if name in axes else nnx.data(None)

        self.codes, self.scales = held("codes"), held("scales")
        self.offsets, self.outer = held("offsets"), held("outer")
        self.codes.set_metadata(form=form)  # for those who make random ones
        self.head: QuantizedLinear | None = nnx.data(None)

    @classmethod
    def abstract(cls, table: Embedding, form: WeightForm, *, has_tied_head: bool) -> "QuantizedEmbedding":
        """Of shapes, in the place of `table`. ValueError for a form that rows can't have."""
        (rows, width), value = table.weight.get_metadata("axes"), table.weight.get_value()
        if form.is_reordered:
            raise ValueError("the rows of a table have no order of their own (act-order)")
        shape = LinearShape(inputs=((width, value.shape[1]),), outputs=((rows, value.shape[0]),))
        leaves = {
            name: jax.ShapeDtypeStruct(tuple(sizes.values()), dtype)
            for name, (sizes, dtype) in _leaves(shape, form).items()
        }
        made = cls(shape, form, leaves, value.dtype)
        if has_tied_head:
            made.head = QuantizedLinear.of_shapes(shape, form)
        return made

    def __call__(self, ids: Int[Array, "*t"]) -> Float[Array, "*t width"]:
        return self.rows(ids).astype(self.dtype)

    def rows(self, ids: Int[Array, "*t"]) -> Float[Array, "*t width"]:
        codes, scales = self.codes[...][ids].astype(jnp.float32), self.scales[...][ids].astype(jnp.float32)
        values = codes.reshape(*scales.shape, -1) * scales[..., None]
        if self.offsets is not None:
            values = values + self.offsets[...][ids][..., None]
        values = values.reshape(codes.shape)
        return values if self.outer is None else values * self.outer[...][ids][..., None]

    def logits(self, hidden: Float[Array, "*t width"], ctx: StepContext) -> Float[Array, "*t rows"]:
        assert self.head is not None, "the model's configuration ties no head to its table"
        return self.head(hidden, ctx, out_dtype=jnp.float32)


def _leaves(shape: LinearShape, form: WeightForm) -> dict[str, tuple[dict[str, int], Any]]:
    """The arrays of such a table: their logical axes, with sizes, and dtypes."""
    rows, (_, width) = dict(shape.outputs), shape.inputs[0]
    groups = rows | {GROUP_AXIS: width // (form.group or width)}
    found = {"codes": (rows | dict(shape.inputs), form.codes), "scales": (groups, form.scales)}
    if form.has_offsets:
        found["offsets"] = (groups, "float32")
    if form.has_outer:
        found["outer"] = (rows, "float32")
    return {name: (axes, jnp.dtype(dtype)) for name, (axes, dtype) in found.items()}
