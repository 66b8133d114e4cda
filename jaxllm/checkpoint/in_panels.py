"""Parameters whose quantised products are put in panels while they load: no product lies twice in memory, but for those
that are read together."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from jaxllm.checkpoint.placement import named
from jaxllm.models.quantized import QuantizedLinear
from jaxllm.models.transformer import Params

LEAVES = ("codes", "scales", "offsets", "outer", "order")


def load_in_panels(load: Callable[..., Any], graph: Any, abstract: Params, mesh: Mesh) -> Params:
    """What `load` reads, which is `load_params` of a checkpoint, for the model of `graph` and `abstract`, whose
    products are not in panels. The parameters are those of the model after `put_in_panels`."""
    model = nnx.merge(graph, jax.tree.map(lambda leaf: leaf, abstract))  # the caller's variables stay abstract
    left: dict[str, dict[str, nnx.Variable]] = {}  # of each product that has not all of its arrays yet
    nodes: dict[str, QuantizedLinear] = {}
    for path, node in nnx.iter_graph(model):
        if isinstance(node, QuantizedLinear) and node.can_lie_in_panels:
            name = ".".join(map(str, path))
            leaves = {f"{name}.{leaf}": getattr(node, leaf) for leaf in LEAVES}
            nodes[name], left[name] = node, {key: var for key, var in leaves.items() if var is not None}
    others: dict[str, jax.Array] = {}

    def take(name: str, array: jax.Array) -> None:
        path = name.rpartition(".")[0]
        waiting = left.get(path, {})
        if name not in waiting:
            others[name] = array
            return
        waiting.pop(name).set_value(array)
        if not waiting:
            node = nodes.pop(path)
            node.put_in_panels()
            jax.block_until_ready(node.panels.get_value())

    load(abstract, mesh, take=take, brief={name for waiting in left.values() for name in waiting})
    params = nnx.split(model)[1]
    for name, variable in named(params).items():
        if name in others:
            variable.set_value(others[name])
    return params
