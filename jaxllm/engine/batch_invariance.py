"""Of which models and devices results can be had that depend on no other request."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxllm.engine.config import EngineConfig
from jaxllm.engine.device.model_shape import ModelShape
from jaxllm.models.layers import HeadsNorm
from jaxllm.models.linear import Linear
from jaxllm.models.moe import MoE
from jaxllm.models.quantized import QuantizedLinear
from jaxllm.models.quantized_embedding import QuantizedEmbedding
from jaxllm.models.wrapped import Wrapped
from jaxllm.pallas_kernels import native
from jaxllm.sharding.mesh import platform_of


def check_batch_invariant(shape: ModelShape, wanted: EngineConfig, mesh: Mesh) -> None:
    """Raises `ValueError` for what `batch_invariant` is not guaranteed for. What a module computes beside the layers of
    `jaxllm.models` is its own affair."""
    if (why := _obstacle(shape, wanted, mesh)) is not None:
        raise ValueError(f"batch_invariant is not to be had {why}; leave it out")


def _obstacle(shape: ModelShape, wanted: EngineConfig, mesh: Mesh) -> str | None:
    if platform_of(mesh) != "cpu":
        return f"on a {platform_of(mesh).upper()} yet, whose products add up by the number of rows"
    if mesh.size > 1:
        return f"on {mesh.size} devices yet, but on one CPU"
    if not native.is_built():
        return "without the C++ kernels; build them with python -m jaxllm.pallas_kernels.native.build"
    dtype = jnp.dtype(shape.dtype).name
    if dtype not in ("float32", "bfloat16"):
        return f"in {dtype}, but in float32 and bfloat16"
    if wanted.whole_prompts or not wanted.generates:
        return "of a model that generates no text"
    if any(spec.is_state for of_layer in shape.caches for spec in of_layer):
        return "with recurrent layers"
    found = {_name(node) for _, node in nnx.iter_graph(shape.model(shape.leaves))} - {None}
    return f"with {', '.join(sorted(map(str, found)))}" if found else None


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
