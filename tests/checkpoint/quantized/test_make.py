"""Dense weights that are quantised while they load, or when new ones come."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxllm.checkpoint.config import read_config
from jaxllm.checkpoint.formats import open_checkpoint
from jaxllm.checkpoint.loader import load_params, load_quantized
from jaxllm.checkpoint.mesh_form import expand_model
from jaxllm.checkpoint.placement import canonical_params, named, place_params
from jaxllm.checkpoint.quantized.make import quantize_model
from jaxllm.errors import ModelFormatError
from jaxllm.models import transformer
from jaxllm.models.quantized import QuantizedLinear
from jaxllm.pallas_kernels.quantized_matmul import QuantizedWeight
from jaxllm.sharding.mesh import make_mesh
from tests.checkpoints import Q_PROJ, check_same, rewrite, write_checkpoint

SIZES = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 128}


def load(folder, name=None, mesh=None):
    """The model's graph, its abstract parameters and its parameters."""
    checkpoint, spec, mesh = open_checkpoint(folder), read_config(folder, jnp.float32), make_mesh(mesh)
    model = transformer.abstract(spec.module.Model, spec.cfg)
    if name is not None:
        quantize_model(model, name)
    expand_model(model, mesh)
    graph, abstract = nnx.split(model)
    read = load_params if name is None else load_quantized
    return graph, abstract, read(checkpoint, spec, abstract, mesh)


@pytest.mark.parametrize(("name", "most"), [("int8", 0.01), ("int4", 0.12), ("fp8", 0.03)])
def test_codes_stand_for_the_weights(tmp_path, name, most):
    """`most` is the distance's square root of the mean square, of that of the weights."""
    write_checkpoint(tmp_path, **SIZES)
    graph, _, params = load(tmp_path, name)
    model, dense = nnx.merge(graph, params), nnx.merge(*load(tmp_path)[::2])
    for path, product in nnx.iter_graph(model):
        if isinstance(product, QuantizedLinear):
            weight = nnx.state(dense)
            for key in path:
                weight = weight[key]
            want = np.asarray(weight["weight"].get_value())
            got = QuantizedWeight(product.codes[...], product.scales[...]).dense(len(product.shape.inputs))
            assert got.shape == want.shape
            assert most / 4 < np.std(np.asarray(got) - want) / np.std(want) <= most, path
    assert isinstance(model.layers[1].mlp.down, QuantizedLinear) and hasattr(model.lm_head, "weight")


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_a_mesh_has_the_same_codes(tmp_path, name):
    """Of eight devices for four KV heads, whose groups are those of 16 inputs at most."""
    write_checkpoint(tmp_path, **SIZES)
    _, abstract, params = load(tmp_path, name, "tensor=8")
    _, _, alone = load(tmp_path, name)
    spread, alone = named(canonical_params(params, make_mesh("tensor=8"))), named(alone)
    for leaf in ("layers.0.attn.qkv.codes", "layers.0.attn.qkv.scales", "layers.1.attn.o.codes"):
        assert np.array_equal(*(np.asarray(x[leaf].get_value()).astype(np.float32) for x in (spread, alone))), leaf
    assert len(named(params)["layers.1.mlp.down.codes"].get_value().sharding.device_set) == 8
    assert named(abstract)["layers.1.mlp.down.codes"].get_value().dtype == name


@pytest.mark.parametrize("mesh", [None, "tensor=8"])
def test_dense_parameters_are_quantised_as_they_come(tmp_path, mesh):
    write_checkpoint(tmp_path, **SIZES)
    _, abstract, params = load(tmp_path, "int8", mesh)
    dense = nnx.to_pure_dict(load(tmp_path)[2])
    check_same(place_params(dense, abstract, make_mesh(mesh)), params)
    dense["layers"][0]["mlp"]["down"]["weight"] = dense["layers"][0]["mlp"]["down"]["weight"][:8]
    with pytest.raises(ValueError, match=r"layers.0.mlp.down.weight has shape \(8, 64\), .* wants \(128, 64\)"):
        place_params(dense, abstract, make_mesh(mesh))


def test_weights_that_are_not_finite(tmp_path):
    write_checkpoint(tmp_path, **SIZES)
    params = load(tmp_path)[2]
    _, abstract, _ = load(tmp_path, "int8")
    bad = nnx.to_pure_dict(params)
    bad["layers"][1]["attn"]["o"]["weight"] = jnp.full((4, 2, 16, 64), jnp.nan)
    with pytest.raises(ModelFormatError, match="layers.1.attn.o.weight has values that are not finite"):
        place_params(bad, abstract, make_mesh(None))
    rewrite(tmp_path, {Q_PROJ: np.full((128, 64), np.nan, np.float32)})
    with pytest.raises(ModelFormatError, match="not finite"):
        load(tmp_path, "int8")


def test_what_no_group_divides(tmp_path):
    write_checkpoint(tmp_path, **SIZES | {"intermediate_size": 20})
    with pytest.raises(
        ValueError, match="layers.0.mlp.down: quantization='int4' .* none divides 20 inputs; choose int8"
    ):
        load(tmp_path, "int4")
    assert jax.tree.leaves(load(tmp_path, "int8")[2])
