"""Products as one CPU reads them: their panels stand for what was stored, and only rows are rounded."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxllm.checkpoint.config import read_config
from jaxllm.checkpoint.formats import open_checkpoint
from jaxllm.checkpoint.in_panels import load_in_panels
from jaxllm.checkpoint.loader import load_params, plan_quantized
from jaxllm.models import transformer
from jaxllm.models.quantized import QuantizedLinear, put_in_panels, round_rows
from jaxllm.pallas_kernels import native
from jaxllm.pallas_kernels.quantized_matmul import panels
from jaxllm.sharding.mesh import make_mesh
from tests.checkpoint.quantized.test_experts import EXPERTS
from tests.checkpoint.quantized.test_experts import SIZES as OF_MIXTURE
from tests.checkpoint.quantized.test_loading import FORMS, PROJECTIONS, Scheme, forward, load, write
from tests.mixtures import write_mixture
from tests.seldom import all_but

pytestmark = pytest.mark.skipif(not native.is_built(), reason="not built: python -m jaxllm.pallas_kernels.native.build")

ROUNDING = 0.05  # of the largest result, in models so small
COLUMNS = jax.jit(panels.columns, static_argnames=("codes", "scales", "has_offsets"))


def load_rounded(folder, scheme):
    checkpoint, spec = open_checkpoint(folder), read_config(folder, jnp.float32)
    model = transformer.abstract(spec.module.Model, spec.cfg)
    plan = plan_quantized(checkpoint, spec, model, scheme.modules)
    round_rows(model)
    graph, abstract = nnx.split(model)
    if not put_in_panels(model):
        return None
    read = partial(load_params, checkpoint, spec, quantized=plan)
    return nnx.merge(nnx.graphdef(model), load_in_panels(read, graph, abstract, make_mesh(None)))


def products(model):
    return {path: node for path, node in nnx.iter_graph(model) if isinstance(node, QuantizedLinear)}


def check_same_weights(plain, rounded):
    num_experts = plain.shape.experts
    num_inputs, outputs = len(plain.shape.inputs), dict(plain.shape.outputs).values()
    ids, about = jnp.arange(np.prod([*outputs]), dtype=jnp.int32), dict(rounded._about_panels)
    outer, _ = about.pop("outer"), about.pop("outputs")
    dense_of = jax.jit(lambda held: held.dense(num_inputs).reshape(-1, len(ids)))
    for expert in range(num_experts or 1):
        held = plain._held if num_experts is None else jax.tree.map(lambda array, i=expert: array[i], plain._held)
        of = rounded.panels[...] if num_experts is None else rounded.panels[expert]
        own = None if outer is None else outer.reshape(-1, len(ids))[expert]
        np.testing.assert_array_equal(COLUMNS(of, ids, outer=own, **about), dense_of(held))


def check(plain, rounded):
    """That all products lie in panels, which stand for the same weights."""
    assert products(plain).keys() == products(rounded).keys()
    for path, node in products(rounded).items():
        assert node.form.in_panels and node.codes is None
        check_same_weights(products(plain)[path], node)
        if node.shape.experts is None and len(node.shape.outputs) == 1:
            some = jnp.asarray([3, 0], jnp.int32)
            np.testing.assert_array_equal(node.columns(some), products(plain)[path].columns(some))
    want, got = forward(plain), forward(rounded)
    error = np.abs(got - want).max() / np.abs(want).max()
    assert 1e-5 < error < ROUNDING


@pytest.mark.parametrize("name", all_but(("int4", "int8", "act-order"), [name for name in FORMS if name != "fp8"]))
def test_products_of_a_layer(name, tmp_path):
    write(tmp_path)
    scheme = Scheme(dict.fromkeys(PROJECTIONS, FORMS[name]))
    check(load(tmp_path, scheme=scheme), load_rounded(tmp_path, scheme))


@pytest.mark.parametrize("name", ["int8", "uint4", "nvfp4"])
def test_products_of_experts(name, tmp_path):
    write_mixture(tmp_path, "Qwen3Moe", **OF_MIXTURE)
    scheme = Scheme(dict.fromkeys(EXPERTS, FORMS[name]))
    check(load(tmp_path, scheme=scheme), load_rounded(tmp_path, scheme))


def test_float8_stays_as_it_is(tmp_path):
    write(tmp_path)
    assert load_rounded(tmp_path, Scheme(dict.fromkeys(PROJECTIONS, FORMS["fp8"]))) is None


def test_members_of_different_forms(tmp_path):
    """Of which one can't lie in panels."""
    write(tmp_path)
    scheme = Scheme({"q_proj": FORMS["int8"], "k_proj": FORMS["fp8"], "v_proj": FORMS["mxfp4"]})
    plain, rounded = load(tmp_path, scheme=scheme), load_rounded(tmp_path, scheme)
    assert {node.form.in_panels for node in products(rounded).values()} == {True, False}
    error = np.abs(forward(rounded) - forward(plain)).max()
    assert 0 < error < ROUNDING * np.abs(forward(plain)).max()


@pytest.mark.parametrize("shared", [True, False])
def test_all_experts_at_once(shared, tmp_path):
    """As a module may have them that gives each row to all."""
    write_mixture(tmp_path, "Qwen3Moe", **OF_MIXTURE)
    scheme = Scheme(dict.fromkeys(EXPERTS, FORMS["int4"]))
    plain, rounded = (
        model.layers[1].mlp.gate_up for model in (load(tmp_path, scheme=scheme), load_rounded(tmp_path, scheme))
    )
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 1 if shared else 4, 64)), jnp.float32)
    ctx = transformer.StepContext.of(jnp.zeros((2, 3), jnp.int32))
    want, got = (jax.jit(lambda x, product=product: product(x, ctx))(x) for product in (plain, rounded))
    assert got.shape == want.shape and jnp.abs(got - want).max() < ROUNDING * jnp.abs(want).max()
