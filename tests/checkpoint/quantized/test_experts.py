"""Quantised experts: what a mixture computes is what one with the dense weights computes."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jaxllm.checkpoint.config import read_config
from jaxllm.checkpoint.formats import open_checkpoint
from jaxllm.checkpoint.forms import give_forms
from jaxllm.checkpoint.loader import load_params, load_quantized, plan_blocks
from jaxllm.checkpoint.mesh_form import expand_model
from jaxllm.checkpoint.placement import place_params
from jaxllm.checkpoint.quantized.detect import scheme_of
from jaxllm.checkpoint.quantized.make import quantize_model
from jaxllm.checkpoint.quantized.write import write_quantized
from jaxllm.errors import ModelFormatError
from jaxllm.models import transformer
from jaxllm.models.linear import Linear
from jaxllm.models.quantized import QuantizedLinear
from jaxllm.pallas_kernels.quantized_matmul import QuantizedWeight
from jaxllm.sharding.mesh import make_mesh
from tests import hf_models
from tests.checkpoint.quantized import make
from tests.checkpoint.quantized.test_loading import FORMS, Scheme, dense, forward, load
from tests.checkpoints import check_same, rewrite
from tests.mixtures import config, form_table, random_values, tensors_of, write_config, write_mixture

EXPERTS = ("gate_proj", "up_proj", "down_proj")
SIZES = {"hidden_size": 64, "moe_intermediate_size": 64, "intermediate_size": 64, "head_dim": 16, "mlp_only_layers": []}


def check_equal(folder, forms, mesh=None):
    write_mixture(folder, "Qwen3Moe", **SIZES)
    scheme = Scheme(forms)
    model = load(folder, mesh, scheme)
    got = forward(model)
    rewrite(folder, {name: dense(weight) for name, weight in scheme.weights.items()})
    want = forward(load(folder))
    assert len(scheme.weights) == 2 * 4 * len(forms)
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * np.abs(want).max())
    return model


QUICK = ("int8", "int4", "nvfp4")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in FORMS if name != "act-order"],
)
def test_all_experts_of_one_form(tmp_path, name):
    moe = check_equal(tmp_path, dict.fromkeys(EXPERTS, FORMS[name])).layers[1].mlp
    assert all(isinstance(product, QuantizedLinear) for product in (moe.gate_up, moe.down))


@pytest.mark.parametrize(
    ("name", "mesh"), [("int8", "expert=2"), ("uint4", "tensor=2,expert=2"), ("nvfp4", "tensor=2")]
)
def test_on_a_mesh(tmp_path, name, mesh):
    check_equal(tmp_path, dict.fromkeys(EXPERTS, FORMS[name]), mesh)


def test_members_of_different_forms(tmp_path):
    check_equal(tmp_path, {"gate_proj": FORMS["int4"], "up_proj": FORMS["int8"], "down_proj": FORMS["fp8"]})


@pytest.mark.parametrize(
    ("forms", "message"),
    [
        (
            dict.fromkeys(EXPERTS, FORMS["act-order"]),
            r"experts.0.\w+_proj takes .*act-order.* not supported for experts",
        ),
        ({"1.mlp.experts.0.up_proj": FORMS["int8"]}, "but not model.layers.1.mlp.experts.1.up_proj.weight"),
        (
            {"0.up_proj": FORMS["int8"], "up_proj": FORMS["int4"], "gate_proj": FORMS["int4"]},
            "experts.1.up_proj is .*int4",
        ),
    ],
)
def test_experts_that_do_not_go_together(tmp_path, forms, message):
    write_mixture(tmp_path, "Qwen3Moe", **SIZES)
    with pytest.raises(ModelFormatError, match=message):
        load(tmp_path, scheme=Scheme(forms))


def write_mxfp4(folder, experts=4, **changes):
    """A checkpoint as gpt-oss is released, and the dense values of it."""
    spec = write_config(folder, "GptOss", **SIZES, **changes, quantization_config={"quant_method": "mxfp4"})
    draw, tensors = np.random.default_rng(0), {}
    values = random_values(spec)
    dense_tensors = tensors_of(values, form_table(spec, 0))
    for name, shape in (("gate_up_proj", (128, 64)), ("down_proj", (64, 64))):
        for i in range(2):
            made = [make.mxfp4(draw, *shape) for _ in range(experts)]
            whole = f"model.layers.{i}.mlp.experts.{name}"
            packed = np.stack([one.tensors["weight_packed"] for one in made])
            tensors[f"{whole}_blocks"] = packed.reshape(experts, shape[0], -1, 16)
            tensors[f"{whole}_scales"] = np.stack([one.tensors["weight_scale"] for one in made])
            dense_tensors[whole] = np.ascontiguousarray(np.stack([one.weight.T for one in made]))
    plain = {name: value for name, value in dense_tensors.items() if f"{name}_blocks" not in tensors}
    save_file(plain | tensors, folder / "model.safetensors")
    return dense_tensors


def load_scheme(folder, mesh=None):
    checkpoint = open_checkpoint(folder)
    return load(folder, mesh, scheme_of(checkpoint, checkpoint.config()))


@pytest.mark.parametrize("mesh", [None, "tensor=2,expert=2"])
def test_mxfp4_of_gpt_oss(tmp_path, mesh):
    """Its rows of gate and up are interleaved, and its groups of 32 are halved where devices want that."""
    dense_tensors = write_mxfp4(tmp_path)
    model = load_scheme(tmp_path, mesh)
    got = forward(model)
    assert model.layers[0].mlp.gate_up.form.codes == "float4_e2m1fn" and type(model.layers[0].attn.qkv) is Linear
    (tmp_path / "config.json").write_text(json.dumps(config("GptOss", **SIZES)))
    save_file(dense_tensors, tmp_path / "model.safetensors")
    want = forward(load(tmp_path))
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * np.abs(want).max())


def forms_of(folder) -> dict:
    spec = read_config(folder, jnp.bfloat16)
    model = transformer.abstract(spec.module.Model, spec.cfg)
    give_forms(open_checkpoint(folder), spec, model, None)
    return {path: node.form for path, node in nnx.iter_graph(model) if isinstance(node, QuantizedLinear)}


def test_the_configuration_of_gpt_oss_alone_gives_the_forms_of_its_files(tmp_path):
    write_mxfp4(tmp_path)
    want = forms_of(tmp_path)
    assert want.keys() == {("layers", i, "mlp", name) for i in range(2) for name in ("gate_up", "down")}
    (tmp_path / "model.safetensors").unlink()
    assert forms_of(tmp_path) == want


BLOCKS, SCALES = (f"model.layers.1.mlp.experts.down_proj_{kind}" for kind in ("blocks", "scales"))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (SCALES, lambda x: None, "experts.0.down_proj has _blocks, but no _scales"),
        (BLOCKS, lambda x: None, "unexpected .*down_proj_scales"),
        (BLOCKS, lambda x: x.reshape(4, 64, 32), r"has shape \[4, 64, 32\]; it must be \[experts"),
        (SCALES, lambda x: x[:3], r"has shape \[3, 64, 2\], and the blocks \[4, 64, 2, 16\]"),
        (BLOCKS, lambda x: x[:, :32], r"down_proj_scales has shape \[4, 64, 2\], and the blocks \[4, 32, 2, 16\]"),
        (SCALES, lambda x: np.full_like(x, 255), "holds scales that are not finite"),
        (SCALES, lambda x: x.astype(np.int32), "has dtype I32; it must be U8"),
    ],
)
def test_hostile_mxfp4(tmp_path, name, change, message):
    write_mxfp4(tmp_path)
    rewrite(tmp_path, {name: change(load_file(tmp_path / "model.safetensors")[name])})
    with pytest.raises(ModelFormatError, match=message):
        load_scheme(tmp_path)


def test_mxfp4_without_blocks_is_refused(tmp_path):
    write_mixture(tmp_path, "GptOss", quantization_config={"quant_method": "mxfp4"})
    with pytest.raises(ModelFormatError, match="it says mxfp4, but no tensor is called"):
        load_scheme(tmp_path)


def test_mxfp4_of_other_experts_is_named(tmp_path):
    write_mxfp4(tmp_path, experts=5)
    with pytest.raises(ModelFormatError, match=r"experts.4.\w+_proj is quantised, but the model has no such module"):
        load_scheme(tmp_path)


@pytest.mark.parametrize(("name", "most"), [("int8", 0.01), ("int4", 0.12), ("fp8", 0.03)])
def test_dense_experts_are_quantised_while_they_load(tmp_path, name, most):
    """Each by scales of its own; routers stay dense. The same on a mesh, and where new weights come."""
    write_mixture(tmp_path, "Qwen2Moe", **SIZES, shared_expert_intermediate_size=256)  # each half has whole groups
    graph, abstract, params = load_made(tmp_path, name)
    moe, plain = nnx.merge(graph, params).layers[1].mlp, load(tmp_path).layers[1].mlp
    for product, want in ((moe.gate_up, plain.gate_up.weight[...]), (moe.down, plain.down.weight[...])):
        for e in range(4):
            got = QuantizedWeight(product.codes[e], product.scales[e]).dense(1)
            assert most / 4 < np.std(np.asarray(got) - want[e]) / np.std(want[e]) <= most
    assert type(moe.router.gate) is Linear and type(moe.shared_gate) is Linear
    assert isinstance(moe.shared.down, QuantizedLinear)
    _, _, split = load_made(tmp_path, name, "expert=2")
    check_same(split, params)
    dense_params = nnx.state(load(tmp_path), nnx.Param)
    check_same(place_params(dense_params, abstract, make_mesh(None)), params)


def load_made(folder, name, mesh=None):
    checkpoint, spec, mesh = open_checkpoint(folder), read_config(folder, jnp.float32), make_mesh(mesh)
    model = transformer.abstract(spec.module.Model, spec.cfg)
    quantize_model(model, name)
    expand_model(model, mesh)
    graph, abstract = nnx.split(model)
    return graph, abstract, load_quantized(checkpoint, spec, abstract, mesh)


def test_blocks_of_gguf_are_kept(tmp_path):
    """Experts are stacked there."""
    pytest.importorskip("torch")
    gguf_files = pytest.importorskip("tests.gguf_files")
    sizes = {"hidden_size": 64, "moe_intermediate_size": 64, "mlp_only_layers": [], "num_hidden_layers": 2}
    kinds = {"ffn_gate_exps": "Q4_0", "ffn_up_exps": "Q4_0", "ffn_down_exps": "Q8_0"}
    written = gguf_files.Converted(
        "Qwen3Moe",
        hf_models.checkpoint(tmp_path, "Qwen3Moe", **sizes),
        lambda name: kinds.get(name.split(".")[-2], "F32"),
    )
    file = written.write(tmp_path / "model.gguf")
    checkpoint, spec = open_checkpoint(file), read_config(file, jnp.float32)
    model = transformer.abstract(spec.module.Model, spec.cfg)
    plan = plan_blocks(checkpoint, spec, model)
    graph, abstract = nnx.split(model)
    kept = nnx.merge(graph, load_params(checkpoint, spec, abstract, make_mesh(None), quantized=plan))
    assert {kept.layers[0].mlp.gate_up.form.codes, kept.layers[0].mlp.down.form.codes} == {"int4", "int8"}
    want = forward(load(file))
    np.testing.assert_allclose(forward(kept), want, rtol=0, atol=2e-5 * np.abs(want).max())


def test_written_experts_are_read_again(tmp_path):
    """As compressed-tensors, whose configuration leaves out the routers."""
    source, target = tmp_path / "source", tmp_path / "target"
    for folder in (source, target):
        folder.mkdir()
    write_mixture(source, "Qwen2Moe", **SIZES)
    write_quantized(source, target, "int8", dtype="auto", max_shard_bytes=2**30)
    checkpoint = open_checkpoint(target)
    assert "model.layers.0.mlp.shared_expert_gate" in checkpoint.config()["quantization_config"]["ignore"]
    got = forward(load_scheme(target))
    graph, _, params = load_made(source, "int8")
    want = forward(nnx.merge(graph, params))
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * np.abs(want).max())
    write_mixture(source, "Qwen2Moe", form=1, **SIZES)
    with pytest.raises(ModelFormatError, match="experts.down_proj stacks the weights of several experts"):
        write_quantized(source, target, "int8", dtype="auto", max_shard_bytes=2**30)
