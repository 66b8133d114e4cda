"""Quantises the dense weights of products, on the devices where they lie, one after the other."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float

from jaxllm.checkpoint.quantized.quantize import KINDS, check_form, codes_and_scales, form_of
from jaxllm.errors import ModelFormatError
from jaxllm.models.linear import Linear
from jaxllm.models.moe import GATES
from jaxllm.models.quantized import QuantizedLinear, WeightForm, to_panels
from jaxllm.pallas_kernels.quantized_matmul import QuantizedWeight
from jaxllm.sharding import rules


def quantize_model(model: nnx.Module, name: str) -> None:
    """Gives the products in the layers of the abstract `model` the form that `--quantization` calls `name`, in place.
    ValueError for an unknown name, a product that no group divides, and a model without any."""
    if name not in KINDS:
        what = "is for GGUF files" if name == "gguf" else "is unknown"
        raise ValueError(
            f"quantization={name!r:.100} {what}; choose one of {', '.join(KINDS)}. A quantised checkpoint needs none"
        )
    num_products = 0
    for path, node in list(nnx.iter_graph(model)):
        for key, child in list(vars(node).items()) if isinstance(node, nnx.Module) and "layers" in path else ():
            if type(child) is Linear and not GATES & dict(child.shape.outputs).keys():
                inner = child.shape.inputs[-1][1]
                try:
                    setattr(node, key, QuantizedLinear.abstract(child, form_of(name, inner)))
                except ValueError as error:
                    raise ValueError(f"{'.'.join(map(str, (*path, key)))}: {error}") from error
                num_products += 1
    if num_products == 0:
        raise ValueError(
            f"quantization={name!r:.100} is for products of jaxllm.models.linear.Linear in the model's layers, and "
            f"{type(model).__name__} has none; leave it out"
        )


def quantized_leaves(
    path: str, weight: Float[Array, "..."], abstract: Mapping[str, nnx.Variable], mesh: Mesh | None = None
) -> dict[str, Array]:
    """The arrays, by the parameters' names, of the product at `path` whose dense weight is `weight`: a canonical one,
    or as `mesh` holds it, then they lie on that. `abstract` are the parameters, of which the product's say its form.
    ModelFormatError if the weight is not finite, ValueError for a form that dense weights can't be given."""
    if (held := abstract.get(f"{path}.panels")) is not None:
        return {f"{path}.panels": _panels(path, weight, held)}
    names = [f"{path}.codes", f"{path}.scales"]
    shardings = None
    if mesh is not None:
        shardings = (*(rules.sharding(abstract[name].axes, mesh) for name in names), rules.replicated(mesh))
    codes = abstract[names[0]]
    form, num_inputs = codes.get_metadata("form"), codes.get_metadata("num_inputs")
    has_experts = codes.get_metadata("has_experts")
    check_form(form, math.prod(weight.shape[int(has_experts) :][:num_inputs]))
    arrays = _arrays(path, weight, _quantizer(form, num_inputs, has_experts, shardings))
    return dict(zip(names, arrays, strict=True))


def _panels(path: str, weight: Float[Array, "..."], held: nnx.Variable) -> Array:
    form, num_inputs = dataclasses.replace(held.get_metadata("form"), in_panels=False), held.get_metadata("num_inputs")
    has_experts = held.get_metadata("has_experts")
    check_form(form, math.prod(weight.shape[int(has_experts) :][:num_inputs]))
    codes, scales = _arrays(path, weight, _quantizer(form, num_inputs, has_experts, None))
    options = {"num_inputs": num_inputs, "scales": form.scales, "has_experts": has_experts}
    return to_panels(QuantizedWeight(codes, scales), **options)


def _arrays(path: str, weight: Float[Array, "..."], make: Callable[..., Any]) -> list[Array]:
    *arrays, is_finite = make(weight)
    if not is_finite:
        raise ModelFormatError(f"{path}.weight has values that are not finite, which can't be quantised")
    return arrays


@cache
def _quantizer(
    form: WeightForm, num_inputs: int, has_experts: bool, shardings: tuple[NamedSharding, ...] | None
) -> Callable[..., Any]:
    def of_one(weight: Array) -> tuple[Array, Array]:
        inputs, outputs = weight.shape[:num_inputs], weight.shape[num_inputs:]
        if form.group is None:
            rows = jnp.moveaxis(weight, range(num_inputs), range(-num_inputs, 0)).reshape(*outputs, -1)
            codes, scales = codes_and_scales(rows, form)
            return codes.reshape(*outputs, *inputs), scales
        groups = weight.reshape(*inputs[:-1], inputs[-1] // form.group, form.group, *outputs)
        codes, scales = codes_and_scales(jnp.moveaxis(groups, num_inputs, -1), form)
        return jnp.moveaxis(codes, -1, num_inputs), jnp.moveaxis(scales, -1, num_inputs)

    @jax.jit(out_shardings=shardings)
    def make(weight: Array) -> tuple[Array, Array, Array]:
        codes, scales = (jax.vmap(of_one) if has_experts else of_one)(weight)
        return codes, scales, jnp.all(jnp.isfinite(scales.astype(jnp.float32)))

    return make
