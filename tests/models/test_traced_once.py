"""A step traces layers that are alike once, and computes what layers do that are called one by one."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxllm.models import transformer
from jaxllm.models.context import StepContext
from jaxllm.models.layers import LayerSpec, Rope
from jaxllm.models.traced_once import TracedOnce
from jaxllm.pallas_kernels.dispatch import UNPLACED, Placement
from tests.tiny import Tiny, dense_caches

FULL, LOCAL = LayerSpec(rope=Rope(theta=1e4)), LayerSpec(rope=Rope(theta=1e3), window=4)


@pytest.fixture
def traced(monkeypatch) -> Counter:
    """How often layers of each window were traced."""
    calls, plain = Counter(), transformer.DecoderLayer.__call__

    def counted(self, *arguments):
        calls[self.attn.window] += 1
        return plain(self, *arguments)

    monkeypatch.setattr(transformer.DecoderLayer, "__call__", counted)
    return calls


def hidden(model: nnx.Module, placement: Placement) -> np.ndarray:
    graph, params = nnx.split(model)

    @jax.jit
    def forward(params, tokens):
        model = nnx.merge(graph, params)
        return model(tokens, StepContext.of(tokens, placement=placement), dense_caches(model))[0]

    return np.asarray(forward(params, jnp.arange(12, dtype=jnp.int32)[None]))


def test_each_kind_of_layer_is_traced_once(traced):
    model = Tiny(layers=(LOCAL, LOCAL, FULL) * 3).model
    once = hidden(model, Placement.default())
    assert traced == {None: 1, 4: 1}
    np.testing.assert_allclose(once, hidden(model, UNPLACED), rtol=1e-5, atol=1e-5)
    assert traced == {None: 4, 4: 7}, "outside of the engine each layer is called as it is"


def test_layers_that_differ_are_traced_apart(traced):
    """In a setting, or in what they hold."""
    model = Tiny(layers=(FULL,) * 5).model
    model.layers[1].mlp.activation = "relu"
    model.layers[3].attn.q_norm = None
    model.layers[3].attn.k_norm = None
    once = hidden(model, Placement.default())
    assert traced == {None: 3}
    np.testing.assert_allclose(once, hidden(model, UNPLACED), rtol=1e-5, atol=1e-5)


class Counting(nnx.Module):
    """Puts its cache back itself, as a layer of several caches does."""

    def __call__(self, x, caches):
        caches[0] = caches[0] + x
        return 2 * x, caches


class View:
    """Like a list, and no pytree."""

    def __init__(self, *items):
        self.items = list(items)

    def __getitem__(self, i):
        return self.items[i]

    def __setitem__(self, i, item):
        self.items[i] = item


def test_a_layer_that_changes_its_caches_is_called_as_it_is():
    call, caches = TracedOnce(), View(jnp.float32(1))

    @jax.jit
    def step(x):
        for layer in (Counting(), Counting()):
            x, given = call(layer, x, caches)
            assert given is caches
        return x, caches[0]

    assert [float(y) for y in step(jnp.float32(3))] == [12, 1 + 3 + 6]
