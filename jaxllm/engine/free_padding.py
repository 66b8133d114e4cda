"""Which models compute nothing for the tokens that pad a step."""

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxllm import models
from jaxllm.engine.device.model_shape import ModelShape
from jaxllm.models.layers import PlainMLP, RMSNorm
from jaxllm.models.linear import Embedding, Linear
from jaxllm.pallas_kernels import native
from jaxllm.sharding.mesh import platform_of


def has_free_padding(shape: ModelShape, mesh: Mesh) -> bool:
    """Whether all that takes time is done by C++ kernels, which are told how many tokens there are. Of models with
    experts, adapters, recurrent layers or parts of somebody else's it is not known."""
    if platform_of(mesh) != "cpu" or mesh.size > 1 or not native.is_built() or not shape.generates:
        return False
    if jnp.dtype(shape.dtype) not in (jnp.float32, jnp.bfloat16):
        return False
    if any(spec.is_state for of_layer in shape.caches for spec in of_layer):
        return False
    nodes = (node for _, node in nnx.iter_graph(shape.model(shape.leaves)) if isinstance(node, nnx.Module))
    return all(isinstance(node, nnx.List) or _skips(node) for node in nodes)


def _skips(node: nnx.Module) -> bool:
    if not type(node).__module__.startswith(f"{models.__name__}."):
        return False
    if isinstance(node, Linear):
        return node.adapter is None and node.shape.experts is None
    has_own = any(isinstance(value, nnx.Variable) for value in vars(node).values())
    return isinstance(node, RMSNorm | Embedding) or not has_own and not isinstance(node, PlainMLP)
