"""Quantised modules in a model: what it computes is what one with the dense weights computes."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from jaxllm.checkpoint.config import read_config
from jaxllm.checkpoint.fill import WeightPart
from jaxllm.checkpoint.formats import open_checkpoint
from jaxllm.checkpoint.loader import load_params, plan_quantized
from jaxllm.checkpoint.mesh_form import expand_model
from jaxllm.checkpoint.placement import place_params
from jaxllm.checkpoint.quantized.fill import ModulePart, fill_table
from jaxllm.checkpoint.quantized.module import QuantizedModule, StoredWeight
from jaxllm.checkpoint.window import HostArray, HostWindow
from jaxllm.errors import MeshError, ModelFormatError
from jaxllm.models import transformer
from jaxllm.models.cache import Dense
from jaxllm.models.context import StepContext
from jaxllm.models.linear import Embedding, Joined
from jaxllm.models.quantized import QuantizedLinear, WeightForm
from jaxllm.models.quantized_embedding import QuantizedEmbedding
from jaxllm.models.weights import Weight
from jaxllm.sharding.mesh import make_mesh
from tests.checkpoints import FUSED, rewrite, write_checkpoint

SIZES = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 128}
FORMS = {
    "int8": WeightForm(codes="int8", group=None, scales="float16"),
    "fp8": WeightForm(codes="float8_e4m3fn", group=None, scales="float32", activations="float8_e4m3fn"),
    "int4": WeightForm(codes="int4", group=32, scales="bfloat16"),
    "uint4": WeightForm(codes="uint4", group=16, scales="float16", has_offsets=True),
    "int8 groups": WeightForm(codes="int8", group=32, scales="float32"),
    "nvfp4": WeightForm(codes="float4_e2m1fn", group=16, scales="float8_e4m3fn", has_outer=True),
    "mxfp4": WeightForm(codes="float4_e2m1fn", group=32, scales="float8_e8m0fnu"),
    "act-order": WeightForm(codes="int4", group=32, scales="float16", is_reordered=True),
}
TOKENS = np.random.default_rng(3).integers(0, 24, (2, 12))


def random_weight(form, shape, seed):
    draw, (rows, columns) = np.random.default_rng(seed), shape
    groups = rows if form.group is None else (rows, columns // form.group)
    low, high = (0, 16) if form.codes == "uint4" else (-8, 8)
    codes = draw.integers(low, high, shape).astype(ml_dtypes.int4 if form.codes == "int4" else np.float32)
    scales = 2.0 ** draw.integers(-7, -4, groups) * (1 if form.scales == "float8_e8m0fnu" else draw.choice([1, 1.5]))
    return StoredWeight(
        codes=codes.astype(jnp.dtype(form.codes)),
        scales=scales.astype(jnp.dtype(form.scales)),
        offsets=draw.normal(0, 0.1, groups).astype(np.float32) if form.has_offsets else None,
        outer=draw.uniform(0.5, 2, rows).astype(np.float32) if form.has_outer else None,
        order=draw.permutation(columns).astype(np.int32) if form.is_reordered else None,
    )


def dense(stored):
    values = stored.codes.astype(np.float32)
    scales = stored.scales.astype(np.float32).reshape(len(values), -1)
    times = values.shape[1] // scales.shape[1]
    values = values * np.repeat(scales, times, 1)
    values = values if stored.offsets is None else values + np.repeat(stored.offsets, times, 1)
    values = values if stored.outer is None else values * stored.outer[:, None]
    if stored.order is None:
        return values
    out = np.empty_like(values)
    out[:, stored.order] = values
    return out


class Scheme:
    """Says of the modules whose names end so that they have these forms."""

    def __init__(self, forms):
        self.forms, self.weights = forms, {}

    def modules(self, stored):
        modules, rest = {}, dict(stored)
        for tensor in stored.values():
            name = tensor.name.removesuffix(".weight")
            form = next((form for end, form in self.forms.items() if name.endswith(end)), None)
            if form is not None:
                del rest[tensor.name]
                weight = self.weights[tensor.name] = random_weight(form, tensor.shape, len(modules))
                modules[name] = QuantizedModule(name, tensor.shape, form, (tensor,), lambda _, weight=weight: weight)
        return modules, rest


def forward(model, mesh=None):
    graph, tokens = nnx.graphdef(model), jnp.asarray(TOKENS)

    def call(params):
        module, ctx = nnx.merge(graph, params), StepContext.of(tokens)
        return module.logits(module(tokens, ctx, [Dense()] * model.cfg.num_layers)[0], ctx)

    return np.asarray(jax.jit(call)(nnx.state(model)))[..., : model.cfg.vocab]


def load(folder, mesh=None, scheme=None):
    checkpoint, spec, mesh = open_checkpoint(folder), read_config(folder, jnp.float32), make_mesh(mesh)
    model = transformer.abstract(spec.module.Model, spec.cfg)
    plan = None if scheme is None else plan_quantized(checkpoint, spec, model, scheme.modules)
    expand_model(model, mesh)
    graph, abstract = nnx.split(model)
    return nnx.merge(graph, load_params(checkpoint, spec, abstract, mesh, quantized=plan))


def write(folder, **changes):
    """A checkpoint, with biases where the family has them."""
    is_fused = "architectures" in changes
    write_checkpoint(folder, **SIZES, **changes, **({} if is_fused else {"attention_bias": True}))
    sizes = {} if is_fused else {"q": 128, "k": 64, "v": 64, "o": 64}
    names = {f"model.layers.{i}.self_attn.{name}_proj.bias": size for i in range(2) for name, size in sizes.items()}
    rewrite(folder, {name: np.linspace(-1, 1, size, dtype=np.float32) for name, size in names.items()})


def check_equal(folder, forms, mesh=None, **changes):
    write(folder, **changes)
    scheme = Scheme(forms)
    model = load(folder, mesh, scheme)
    got = forward(model)
    rewrite(folder, {name: dense(weight) for name, weight in scheme.weights.items()})
    want = forward(load(folder))
    assert {name.split(".")[-2] for name in scheme.weights} == set(forms)
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * np.abs(want).max())
    return model


PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize("name", FORMS)
def test_all_products_of_one_form(tmp_path, name):
    model = check_equal(tmp_path, dict.fromkeys(PROJECTIONS, FORMS[name]))
    products = [model.layers[1].attn.qkv, model.layers[0].mlp.gate_up]
    assert all(isinstance(product, Joined if name == "act-order" else QuantizedLinear) for product in products)


@pytest.mark.parametrize(
    ("name", "mesh"), [("int8 groups", "tensor=2"), ("int8", "tensor=8"), ("uint4", "tensor=8"), ("nvfp4", "tensor=8")]
)
def test_on_a_mesh(tmp_path, name, mesh):
    """Of eight devices each has half of a KV head's queries."""
    model = check_equal(tmp_path, dict.fromkeys(PROJECTIONS, FORMS[name]), mesh)
    down = model.layers[0].mlp.down
    assert len(down.codes.get_value().sharding.device_set) == int(mesh[-1])


def test_groups_are_those_that_devices_have(tmp_path):
    """Of 128 inputs each of eight has 16, of 96 only 12: groups of 32 become smaller, or are refused."""
    model = check_equal(tmp_path, {"down_proj": FORMS["int4"]}, "tensor=8")
    assert model.layers[0].mlp.down.codes.shape[:2] == (8, 16)
    write_checkpoint(tmp_path, **SIZES | {"intermediate_size": 96})
    with pytest.raises(MeshError, match="layers.0.mlp.down on .*groups of 32 inputs .* don't divide 12 inputs"):
        load(tmp_path, "tensor=8", Scheme({"down_proj": FORMS["int4"]}))


def test_act_order_is_refused_where_inputs_are_split(tmp_path):
    write(tmp_path)
    load(tmp_path, "tensor=2", Scheme({"up_proj": FORMS["act-order"]}))
    with pytest.raises(MeshError, match="layers.0.attn.o takes its inputs in an order of its own"):
        load(tmp_path, "tensor=2", Scheme({"o_proj": FORMS["act-order"]}))


def test_a_table_has_no_order_of_its_own(tmp_path):
    write(tmp_path)
    with pytest.raises(ModelFormatError, match="embed_tokens: the rows of a table have no order of their own"):
        load(tmp_path, None, Scheme({"embed_tokens": FORMS["act-order"]}))


@pytest.mark.parametrize(("name", "mesh"), [("uint4", None), ("uint4", "tensor=2"), ("int8", "tensor=2")])
@pytest.mark.parametrize("tied", [False, True])
def test_a_table(tmp_path, name, mesh, tied):
    """Of 27 rows, which two devices share after padding; a head that is tied to it is a product of its codes."""
    forms = dict.fromkeys(("embed_tokens", "down_proj"), FORMS[name])
    model = check_equal(tmp_path, forms, mesh, vocab_size=27, tie_word_embeddings=tied)
    assert isinstance(model.embed, QuantizedEmbedding) and (model.embed.head is None) == (not tied)
    assert (model.embed.codes.get_value().shape, model.embed.codes.get_value().dtype) == (
        (27 if mesh is None else 28, 64),
        FORMS[name].codes,
    )


@pytest.mark.parametrize("name", ["int8", "uint4", "nvfp4", "mxfp4"])
def test_looked_up_rows_are_those_that_the_codes_stand_for(name):
    """To the bit, before they are rounded to the model's dtype."""
    table = nnx.eval_shape(lambda: Embedding(nnx.Param(jnp.zeros((40, 64), jnp.bfloat16), axes=AXES)))
    stored = random_weight(FORMS[name], (40, 64), seed=1)
    made = QuantizedEmbedding.abstract(table, FORMS[name], has_tied_head=False)
    hosts = {leaf: np.empty(x.get_value().shape, x.get_value().dtype) for leaf, x in nnx.state(made).items()}
    whole = {leaf: HostArray([HostWindow(host, (0,) * host.ndim)]) for leaf, host in hosts.items()}
    module = QuantizedModule("", (40, 64), FORMS[name], (), lambda _: stored)
    fill_table(whole, ModulePart(module, WeightPart.at("", Weight("", "v d -> v d"), (40, 64), 0)))
    nnx.update(made, {leaf: jnp.asarray(host) for leaf, host in hosts.items()})
    ids = jnp.asarray([[3, 39], [0, 3]])
    want = dense(stored)[np.asarray(ids)]
    np.testing.assert_array_equal(jax.jit(lambda: made.rows(ids))(), want)
    np.testing.assert_array_equal(made(ids).astype(np.float32), want.astype(jnp.bfloat16).astype(np.float32))


AXES = ("vocab", "embed")


@pytest.mark.parametrize("tied", [False, True])
def test_two_tokens_as_labels(tmp_path, tied):
    """Of a language model that classifies: one's likelihood over the other's, by a quantised head or table."""
    name = "embed_tokens" if tied else "lm_head"
    write_checkpoint(tmp_path, **SIZES, tie_word_embeddings=tied)
    scheme = Scheme({name: FORMS["uint4"]})
    model = load(tmp_path, None, scheme)
    model.cfg = replace(model.cfg, task="classify", labels=("yes",), label_tokens=(5, 2))
    pooled = np.random.default_rng(0).standard_normal((3, 64), np.float32)
    (weight,) = scheme.weights.values()
    less, more = dense(weight)[[5, 2]]
    got = model.head(jnp.asarray(pooled), StepContext.of(jnp.zeros(3, jnp.int32)))
    np.testing.assert_allclose(got[:, 0], pooled @ (more - less), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", ["int8", "uint4", "nvfp4", "act-order"])
def test_columns_are_those_that_the_codes_stand_for(tmp_path, name):
    write_checkpoint(tmp_path, **SIZES)
    scheme = Scheme({"lm_head": FORMS[name]})
    head = load(tmp_path, None, scheme).lm_head
    want = dense(scheme.weights["lm_head.weight"])[[5, 2]].T
    np.testing.assert_array_equal(jax.jit(lambda: head.columns(jnp.asarray([5, 2])))(), want)


def test_members_of_different_forms(tmp_path):
    forms = {"q_proj": FORMS["int4"], "v_proj": FORMS["int8"], "up_proj": FORMS["fp8"], "down_proj": FORMS["uint4"]}
    model = check_equal(tmp_path, forms, "tensor=2")
    assert len(model.layers[0].attn.qkv.parts) == 3 and len(model.layers[0].mlp.gate_up.parts) == 2


def test_fused_tensors(tmp_path):
    check_equal(tmp_path, {"qkv_proj": FORMS["int8"], "gate_up_proj": FORMS["uint4"]}, **FUSED)


def test_a_head(tmp_path):
    check_equal(tmp_path, {"lm_head": FORMS["int8"]}, "tensor=2")


def test_biases_of_zeros_may_be_more_than_the_model_has(tmp_path):
    write_checkpoint(tmp_path, **SIZES)
    rewrite(tmp_path, {"model.layers.0.mlp.down_proj.bias": np.zeros(64, np.float32)})
    load(tmp_path, None, Scheme({"down_proj": FORMS["int8"]}))
    rewrite(tmp_path, {"model.layers.0.mlp.down_proj.bias": np.ones(64, np.float32)})
    with pytest.raises(ModelFormatError, match="unexpected model.layers.0.mlp.down_proj.bias"):
        load(tmp_path, None, Scheme({"down_proj": FORMS["int8"]}))


@pytest.mark.parametrize("mesh", [None, "tensor=8"])
def test_dense_weights_become_members_of_different_forms(tmp_path, mesh):
    """Each member in the form that it has, or dense."""
    write(tmp_path)
    forms = {"q_proj": FORMS["int4"], "v_proj": FORMS["int8"], "up_proj": FORMS["int8"]}
    model, new = load(tmp_path, mesh, Scheme(forms)), nnx.to_pure_dict(nnx.state(load(tmp_path)))
    graph, abstract = nnx.split(model)
    placed = nnx.merge(graph, place_params(new, abstract, make_mesh(mesh)))
    want, got = forward(load(tmp_path)), forward(placed, mesh)
    assert 0 < np.std(got - want) < 0.3 * np.std(want)
    dense = new["layers"][0]["attn"]["qkv"]["weight"]
    new["layers"][0]["attn"]["qkv"]["weight"] = dense[:, :, :-1]
    with pytest.raises(ValueError, match=r"layers.0.attn.qkv.weight has shape .*wants \(64, 4, 4, 16\)"):
        place_params(new, abstract, make_mesh(mesh))


@pytest.mark.parametrize("name", ["uint4", "act-order", "nvfp4"])
def test_dense_weights_do_not_take_every_form(tmp_path, name):
    write_checkpoint(tmp_path, **SIZES)
    checkpoint, spec, mesh = open_checkpoint(tmp_path), read_config(tmp_path, jnp.float32), make_mesh(None)
    model = transformer.abstract(spec.module.Model, spec.cfg)
    plan_quantized(checkpoint, spec, model, Scheme({"down_proj": FORMS[name]}).modules)
    dense = nnx.to_pure_dict(nnx.state(load(tmp_path)))
    with pytest.raises(ValueError, match="dense weights can't be quantised to WeightForm"):
        place_params(dense, nnx.split(model)[1], mesh)
