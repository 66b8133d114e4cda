"""A training step in the caller's program whose mesh has explicit axes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxllm.models.cache import Dense
from jaxllm.models.context import StepContext
from tests.seldom import all_but

TOKENS = jnp.asarray(np.random.default_rng(5).integers(1, 90, (4, 12)), jnp.int32)


def nll(params: nnx.State, graph: nnx.GraphDef, tokens: jax.Array) -> jax.Array:
    model, ctx = nnx.merge(graph, params), StepContext.of(tokens)
    hidden, _ = model(tokens, ctx, [Dense()] * model.cfg.num_layers)
    says = jax.nn.log_softmax(model.logits(hidden, ctx))[:, :-1]
    return -jnp.mean(jnp.sum(says * jax.nn.one_hot(tokens[:, 1:], says.shape[-1]), axis=-1))


@pytest.mark.parametrize("fsdp", all_but((True,), [False, True]))
def test_a_batch_in_shards_trains_as_it_does_whole(tiny, fsdp):
    graph, params = nnx.split(tiny.model, nnx.Param)
    want = jax.value_and_grad(nll)(params, graph, TOKENS)
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)

    def step(params: nnx.State, tokens: jax.Array):
        def gathered(params: nnx.State) -> jax.Array:
            return nll(jax.tree.map(lambda leaf: jax.sharding.reshard(leaf, P()), params), graph, tokens)

        return jax.value_and_grad(gathered)(params)

    def spread(leaf: jax.Array) -> jax.Array:
        return jax.device_put(leaf, NamedSharding(mesh, P("data") if fsdp and leaf.shape[0] % 2 == 0 else P()))

    with jax.set_mesh(mesh):
        placed = jax.tree.map(spread, params)
        got = jax.jit(step)(placed, jax.device_put(TOKENS, NamedSharding(mesh, P("data"))))
    np.testing.assert_allclose(got[0], want[0], rtol=1e-6)
    for leaf, grad, expected in zip(*map(jax.tree.leaves, (placed, got[1], want[1])), strict=True):
        assert grad.sharding.is_equivalent_to(leaf.sharding, leaf.ndim)
        np.testing.assert_allclose(grad, expected, atol=1e-5)
