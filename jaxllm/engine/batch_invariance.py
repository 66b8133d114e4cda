"""Of which models and devices results can be had that depend on no other request."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxllm.engine.config import EngineConfig
from jaxllm.engine.device.kv_scales import kv_specs
from jaxllm.engine.device.model_shape import ModelShape
from jaxllm.engine.kv_cache import is_served
from jaxllm.models.layers import HeadsNorm
from jaxllm.models.linear import Linear
from jaxllm.models.moe import MoE
from jaxllm.models.quantized import QuantizedLinear
from jaxllm.models.quantized_embedding import QuantizedEmbedding
from jaxllm.models.wrapped import Wrapped
from jaxllm.pallas_kernels import native
from jaxllm.pallas_kernels.rounding import fuses_products
from jaxllm.sharding.mesh import platform_of


def check_batch_invariant(shape: ModelShape, wanted: EngineConfig, mesh: Mesh) -> None:
    """Raises `ValueError` for what `batch_invariant` is not guaranteed for. What a module computes beside the layers of
    `jaxllm.models` is its own affair."""
    if (why := _obstacle(shape, wanted, mesh)) is not None:
        raise ValueError(f"batch_invariant is not to be had {why}; leave it out")


def check_arithmetic(mesh: Mesh) -> None:
    """Raises `ValueError` if XLA's operations on single elements depend, on this device, on what they are compiled
    with. On a CPU they are those of the C++ kernels."""
    if platform_of(mesh) != "cpu" and fuses_products(device := mesh.devices.flat[0]):
        raise ValueError(
            f"batch_invariant is not to be had on {device.device_kind} with this version of JAX, whose compiler makes "
            "one operation of a product and a sum where it finds them together; take a newer JAX, or leave it out"
        )


def _obstacle(shape: ModelShape, wanted: EngineConfig, mesh: Mesh) -> str | None:
    platform = platform_of(mesh)
    if mesh.size > 1:
        return f"on {mesh.size} devices, which add up parts of a sum in an order of their own, but on one"
    if platform == "cpu" and not native.is_built():
        return "without the C++ kernels; build them with python -m jaxllm.pallas_kernels.native.build"
    dtype = jnp.dtype(shape.dtype).name
    if dtype not in ("float32", "bfloat16"):
        return f"in {dtype}, but in float32 and bfloat16"
    if wanted.whole_prompts or not wanted.generates:
        return "of a model that generates no text"
    if any(spec.is_state for of_layer in shape.caches for spec in of_layer):
        return "with recurrent layers"
    model = shape.model(shape.leaves)
    if found := {_name(node) for _, node in nnx.iter_graph(model)} - {None}:
        return f"with {', '.join(sorted(map(str, found)))}"
    for spec in dict.fromkeys(kv_specs(shape.caches)):
        if not is_served(spec, shape.dtype, shape, wanted, mesh, model.cfg.heads):  # 8 bits are `check_platform`'s
            heads, blocks = f"{model.cfg.heads} heads of {spec.shape[1]}", f"blocks of {wanted.block_size} tokens"
            kind = mesh.devices.flat[0].device_kind
            return f"with {heads} and {blocks}, which no kernel attends to in order on {kind} ({platform})"
    return None


def _name(node: Any) -> str | None:
    """What a part of a model is whose results may depend on others' rows; None if it is none."""
    if isinstance(node, QuantizedLinear | QuantizedEmbedding):
        return "quantised weights"
    if isinstance(node, MoE):
        return "experts, which share their rows out"
    if isinstance(node, HeadsNorm):
        return "norms over all heads"
    if isinstance(node, Wrapped):
        return "functions and wrapped modules, whose products are XLA's"
    if isinstance(node, nnx.LoRA) or isinstance(node, Linear) and node.adapter is not None:
        return "adapters, whose products are XLA's"
    return None
