"""Models with random parameters, from nothing but a `config.json`."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxllm.checkpoint.config import read_config
from jaxllm.checkpoint.loader import abstract_params
from jaxllm.engine import dummy
from jaxllm.engine.device import device_memory
from jaxllm.errors import ModelFormatError, OutOfMemoryError
from jaxllm.models import registry
from jaxllm.sharding.mesh import make_mesh
from jaxllm.sharding.rules import sharding
from tests import mixtures
from tests.checkpoints import HF, write_config

FAMILY_KEYS = {  # that some family wants and the others don't mind
    "ffn_dim": 20,
    "sliding_window": 32,
    "query_pre_attn_scalar": 4,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_config(folder)
    return folder


ONE_OF_EACH_FILE = {file: name for name, file in reversed(registry.ARCHITECTURES.items())}
CLASSIFIERS = "ModernBertForSequenceClassification", "Qwen3ForSequenceClassification"


@pytest.mark.parametrize("architecture", [*ONE_OF_EACH_FILE.values(), *CLASSIFIERS])
def test_dummy_weights_of_each_architecture(tmp_path, architecture):
    family = architecture.removesuffix("ForCausalLM")
    if family in mixtures.FAMILIES:
        mixtures.write_config(tmp_path, family, num_key_value_heads=4)
    else:
        write_config(tmp_path, architectures=[architecture], **FAMILY_KEYS)
    mesh = make_mesh("tensor=4")
    cfg, params = dummy.dummy_model(tmp_path, "bfloat16", mesh)
    spec = read_config(tmp_path, jnp.bfloat16)
    assert cfg == spec.cfg
    made = nnx.state(spec.module.Model(cfg, rngs=nnx.Rngs(params=0)), nnx.Param)
    want = abstract_params(spec)
    assert jax.tree.structure(params) == jax.tree.structure(want)
    for got, expected, own in zip(*map(variables, (params, want, made)), strict=True):
        array, shape = got.get_value(), expected.get_value()
        assert (array.shape, array.dtype) == (shape.shape, shape.dtype)
        assert array.sharding.is_equivalent_to(sharding(expected.axes, mesh), array.ndim)
        values = np.asarray(array.astype(jnp.float32))
        if array.ndim == 1:
            np.testing.assert_array_equal(values, np.asarray(own.get_value().astype(jnp.float32)))
        else:
            assert len(np.unique(values)) > min(values.size, 1000) // 4
            assert np.abs(values).max() <= 0.02 * math.sqrt(3) * 1.01


def variables(params) -> list:
    return jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))


def test_dummy_weights_have_the_moments_of_what_they_are():
    values = np.asarray(dummy._uniform((64, 8, 512), salt=3)) * dummy._WIDTH
    assert abs(values.mean()) < 2e-4
    assert values.std() == pytest.approx(0.02, rel=0.01)
    flat = values.reshape(64, -1)
    assert np.abs(np.corrcoef(flat) - np.eye(64)).max() < 0.08
    other = np.asarray(dummy._uniform((64, 8, 512), salt=4))
    assert abs(np.corrcoef(values.ravel(), other.ravel())[0, 1]) < 0.01


def test_dummy_weights_do_not_depend_on_the_mesh(model_dir):
    one, four = (dummy.dummy_model(model_dir, "float32", make_mesh(mesh))[1] for mesh in (None, "tensor=4"))
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(four), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_a_config_itself_will_do(model_dir, tmp_path):
    cfg, _ = dummy.dummy_model(model_dir / "config.json", "auto", make_mesh(None))
    assert cfg.vocab == HF["vocab_size"]
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match="other.json is not named config.json"):
        dummy.dummy_model(tmp_path / "other.json", "auto", make_mesh(None))
    with pytest.raises(ModelFormatError, match="not a directory"):
        dummy.dummy_model(tmp_path / "nowhere", "auto", make_mesh(None))


def test_parameters_that_cannot_fit_are_not_made(model_dir, monkeypatch):
    monkeypatch.setattr(device_memory, "machine_bytes", lambda: 1000)
    with pytest.raises(OutOfMemoryError, match="on each device, which has 0.00 GB; use more devices"):
        dummy.dummy_model(model_dir, "float32", make_mesh(None))
