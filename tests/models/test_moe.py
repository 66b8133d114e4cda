"""Mixtures of experts: routing against an oracle in numpy, and the layer against a loop over tokens and experts."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxllm.models.context import StepContext
from jaxllm.models.moe import Activation, Experts, MoE, Router, Routing
from jaxllm.pallas_kernels.dispatch import UNPLACED, Placement

EXPERTS = 16
ROUTINGS = {
    "softmax": Routing(experts=EXPERTS, top_k=4),
    "softmax, as they are": Routing(experts=EXPERTS, top_k=3, renormalise=False),
    "softmax, scaled": Routing(experts=EXPERTS, top_k=4, renormalise=False, scale=16.0),
    "softmax, corrected": Routing(experts=EXPERTS, top_k=4, has_correction=True, eps=1e-12),
    "softmax, best groups": Routing(
        experts=EXPERTS, top_k=4, groups=4, top_groups=2, group_score="max", renormalise=False
    ),
    "sigmoid": Routing(experts=EXPERTS, top_k=4, score="sigmoid"),
    "sigmoid of one": Routing(experts=EXPERTS, top_k=1, score="sigmoid", renormalise=False),
    "sigmoid, corrected, groups": Routing(
        experts=EXPERTS, top_k=4, score="sigmoid", has_correction=True, groups=4, top_groups=2, scale=2.5
    ),
    "groups of one": Routing(experts=EXPERTS, top_k=4, score="sigmoid", groups=EXPERTS, top_groups=6),
    "all": Routing(experts=EXPERTS, top_k=EXPERTS, renormalise=False),
}
ACTIVATIONS = {
    "silu": (Activation(), lambda gate, up: gate / (1 + np.exp(-gate)) * up),
    "relu": (Activation(name="relu"), lambda gate, up: np.maximum(gate, 0) * up),
    "clamped": (
        Activation(limit=0.5, alpha=1.702),
        lambda gate, up: (
            (np.clip(up, -0.5, 0.5) + 1) * np.minimum(gate, 0.5) / (1 + np.exp(-1.702 * np.minimum(gate, 0.5)))
        ),
    ),
}


def softmax(x):
    return (lambda e: e / e.sum(-1, keepdims=True))(np.exp(x - x.max(-1, keepdims=True)))


def route(logits, routing: Routing, correction):
    """Weights and experts of each token, as DeepSeek-V3 and Mixtral choose them; the first of equal ones."""
    scores = softmax(logits) if routing.score == "softmax" else 1 / (1 + np.exp(-logits))
    choice = scores if correction is None else scores + correction
    if routing.groups > 1:
        grouped = np.sort(choice.reshape(len(choice), routing.groups, -1), axis=-1)
        of_group = grouped[..., -2:].sum(-1) if routing.group_score == "top2" else grouped[..., -1]
        best = np.argsort(-of_group, axis=-1, kind="stable")[:, : routing.top_groups]
        is_in = np.zeros_like(of_group, bool)
        np.put_along_axis(is_in, best, True, axis=-1)
        choice = np.where(np.repeat(is_in, routing.experts // routing.groups, axis=-1), choice, -np.inf)
    ids = np.argsort(-choice, axis=-1, kind="stable")[:, : routing.top_k]
    weights = np.take_along_axis(scores, ids, axis=-1)
    if routing.renormalise:
        weights = weights / (weights.sum(-1, keepdims=True) + routing.eps)
    return weights * routing.scale, ids


@pytest.mark.parametrize("name", ROUTINGS)
def test_routing(name):
    """Also of logits of which many are equal."""
    routing, rng = ROUTINGS[name], np.random.default_rng(0)
    logits = np.concatenate([rng.normal(size=(200, EXPERTS)) * 2, rng.integers(-2, 3, (40, EXPERTS))])
    correction = rng.normal(size=EXPERTS) if routing.has_correction else None
    logits, correction = (None if x is None else x.astype(np.float32) for x in (logits, correction))
    weights, ids = jax.jit(routing.choose)(logits, correction)
    want_weights, want_ids = route(logits, routing, correction)
    assert weights.dtype == jnp.float32 and ids.dtype == jnp.int32
    np.testing.assert_array_equal(ids, want_ids)
    np.testing.assert_allclose(weights, want_weights, rtol=1e-5)
    if correction is not None:  # it changes the choice, and no weight
        assert (want_ids != route(logits, routing, np.zeros(EXPERTS))[1]).any()


def test_softmax_over_the_chosen_is_softmax_over_all_renormalised():
    """As gpt-oss defines it."""
    logits = np.random.default_rng(0).normal(size=(50, EXPERTS)).astype(np.float32)
    weights, ids = jax.jit(ROUTINGS["softmax"].choose)(logits)
    np.testing.assert_allclose(weights, softmax(np.take_along_axis(logits, np.asarray(ids), -1)), rtol=1e-5)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"score": "tanh"}, "tanh"),
        ({"group_score": "mean"}, "mean"),
        ({"groups": 3}, "groups can't be taken"),
        ({"groups": 4, "top_groups": 5}, "5 of 4 groups"),
        ({"groups": 4, "top_groups": 1, "top_k": 5}, "5 experts a token"),
        ({"top_k": 17}, "17 experts a token"),
        ({"top_k": 0}, "0 experts a token"),
    ],
)
def test_routings_that_can_t_be(fields, error):
    with pytest.raises(ValueError, match=error):
        Routing(**({"experts": EXPERTS, "top_k": 4} | fields))


def layer_of(spec: Experts) -> MoE:
    """With biases and corrections that are not zeros."""
    cfg = SimpleNamespace(embed=24, mlp_bias=False, activation="silu", dtype=jnp.dtype("float32"))
    layer = spec(cfg, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    for param in (layer.gate_up.bias, layer.down.bias, layer.router.gate.bias, layer.router.correction):
        if param is not None:
            param.set_value(jnp.asarray(rng.normal(size=param.shape), param.dtype))
    return layer


def run(layer: MoE, x, is_token=None, placement=UNPLACED):
    graph, state = nnx.split(layer)

    def forward(state, x, is_token):
        ctx = StepContext.of(jnp.zeros(len(x), jnp.int32), placement=placement)
        return nnx.merge(graph, state)(x, replace(ctx, is_token=is_token))

    return np.asarray(jax.jit(forward)(state, x, is_token))


def loop(layer: MoE, activation, x):
    """What the layer defines, token by token."""
    spec = layer.spec
    value = partial(np.asarray, dtype=np.float64)
    gate_up, down, router = (value(linear.weight[...]) for linear in (layer.gate_up, layer.down, layer.router.gate))
    zeros = [np.zeros((spec.routing.experts, 2, spec.mlp)), np.zeros((spec.routing.experts, x.shape[1]))]
    if spec.has_bias:
        zeros = [value(layer.gate_up.bias[...]), value(layer.down.bias[...])]
    logits = x @ router + (value(layer.router.gate.bias[...]) if spec.routing.has_bias else 0)
    correction = None if layer.router.correction is None else value(layer.router.correction[...])
    y = np.zeros(x.shape)
    for token, (weights, ids) in enumerate(zip(*route(logits, spec.routing, correction), strict=True)):
        for weight, e in zip(weights, ids, strict=True):
            row = x[token] * weight if spec.weighs_input else x[token]
            both = np.einsum("d,dgm->gm", row, gate_up[e]) + zeros[0][e]
            made = activation(both[0], both[1]) @ down[e] + zeros[1][e]
            y[token] += made if spec.weighs_input else weight * made
    return y


def test_a_router_in_float32_in_a_model_of_bfloat16():
    routing = Routing(experts=EXPERTS, top_k=4, is_float32=True)
    router = Router(SimpleNamespace(embed=24, dtype=jnp.dtype("bfloat16")), routing, rngs=nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(32, 24)), jnp.bfloat16)
    weights, ids = router(x, StepContext.of(jnp.zeros(32, jnp.int32), placement=UNPLACED))
    gate = router.gate.weight[...]
    assert gate.dtype == jnp.float32
    want = route(np.asarray(x, np.float64) @ np.asarray(gate, np.float64), routing, None)
    np.testing.assert_array_equal(ids, want[1])
    np.testing.assert_allclose(weights, want[0], rtol=1e-5)


@pytest.mark.parametrize("placement", [UNPLACED, Placement.default()], ids=["XLA", "placed"])
@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize(
    ("routing", "options"),
    [
        ("softmax", {}),
        ("softmax", {"has_bias": True}),
        ("sigmoid of one", {"weighs_input": True}),
        ("sigmoid, corrected, groups", {"has_bias": True, "weighs_input": True}),
    ],
)
def test_the_layer(routing, options, act, placement):
    activation, defined = ACTIVATIONS[act]
    routing = replace(ROUTINGS[routing], has_bias=bool(options))
    layer = layer_of(Experts(routing=routing, mlp=20, activation=activation, **options))
    x = np.random.default_rng(1).normal(size=(9, 24)).astype(np.float32)
    got = run(layer, x, placement=placement)
    np.testing.assert_allclose(got, loop(layer, defined, x.astype(np.float64)), rtol=1e-4, atol=1e-5)


def test_experts_that_all_tokens_take():
    spec = Experts(routing=ROUTINGS["softmax"], mlp=20, shared_mlp=12, has_shared_gate=True)
    layer = layer_of(spec)
    x = np.random.default_rng(1).normal(size=(9, 24)).astype(np.float32)
    without, ctx = layer_of(replace(spec, shared_mlp=0, has_shared_gate=False)), StepContext.of(jnp.zeros(9, jnp.int32))
    for name in ("router", "gate_up", "down"):
        setattr(without, name, getattr(layer, name))
    gate = 1 / (1 + np.exp(-x @ np.asarray(layer.shared_gate.weight[...])))
    want = run(without, x) + gate * np.asarray(layer.shared(jnp.asarray(x), ctx))
    np.testing.assert_allclose(run(layer, x), want, rtol=1e-5, atol=1e-6)


def test_the_order_of_the_experts_changes_nothing():
    layer, moved = (layer_of(Experts(routing=ROUTINGS["softmax"], mlp=20, has_bias=True)) for _ in range(2))
    order = np.random.default_rng(2).permutation(EXPERTS)
    moved.router.gate.weight.set_value(layer.router.gate.weight[...][:, order])
    for name in ("gate_up", "down"):
        for param in ("weight", "bias"):
            getattr(getattr(moved, name), param).set_value(getattr(getattr(layer, name), param)[...][order])
    x = np.random.default_rng(1).normal(size=(9, 24)).astype(np.float32)
    np.testing.assert_allclose(run(layer, x), run(moved, x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("placement", [UNPLACED, Placement.default()], ids=["XLA", "placed"])
def test_padding_is_sent_to_no_expert(placement):
    """Experts that only padding would be sent to are NaN; so is padding itself, once."""
    layer = layer_of(Experts(routing=ROUTINGS["softmax"], mlp=20))
    x = np.random.default_rng(1).normal(size=(9, 24)).astype(np.float32)
    is_token = np.arange(9) < 2
    want = run(layer, x, placement=placement)[:2]
    ids = route(x @ np.asarray(layer.router.gate.weight[...]), layer.spec.routing, None)[1]
    unused = np.setdiff1d(np.arange(EXPERTS), ids[:2])
    assert np.isin(unused, ids[2:]).any()
    for linear in (layer.gate_up, layer.down):
        linear.weight.set_value(linear.weight[...].at[unused].set(jnp.nan))
    got = run(layer, x, is_token, placement)
    np.testing.assert_allclose(got[:2], want, rtol=1e-6)
    assert (got[2:] == 0).all()
    x[2:] = np.nan
    np.testing.assert_array_equal(run(layer, x, is_token, placement)[:2], got[:2])
