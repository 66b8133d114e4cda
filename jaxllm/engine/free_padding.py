"""Which models compute nothing for the tokens that pad a step."""

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

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
    if jnp.dtype(shape.dtype) not in (jnp.float32, jnp.bfloat16) or any(
        spec.is_state for one in shape.caches for spec in one
    ):
        return False
    return all(_skips(node) for _, node in nnx.iter_graph(shape.model(shape.leaves)) if isinstance(node, nnx.Module))


def _skips(node: nnx.Module) -> bool:
    if isinstance(node, Linear):
        return node.adapter is None and node.shape.experts is None
    has_own = any(isinstance(value, nnx.Variable) for value in vars(node).values())
    return isinstance(node, RMSNorm | Embedding) or not has_own and not isinstance(node, PlainMLP)
