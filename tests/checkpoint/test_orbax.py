"""What a trainer has saved with Orbax is served: an nnx.State or nested dicts, from another mesh, from a step."""

import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxllm import LLM
from jaxllm.checkpoint.mesh_form import expand_model
from jaxllm.checkpoint.orbax_tree import restore_params
from jaxllm.checkpoint.placement import canonical_params, named, place_params
from jaxllm.errors import ModelFormatError
from jaxllm.interchange.hf_config import made_config
from jaxllm.models import load, save_hf, transformer
from jaxllm.sharding.mesh import make_mesh
from tests.tiny import Tiny, greedy, ids, make_llm, tokens

ocp = pytest.importorskip("orbax.checkpoint")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
PROMPT = [3, 14, 15, 92, 65]


def save(path, tree) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)


def state_of(tiny):
    return nnx.state(tiny.model, nnx.Param)


def restored(path, cfg, spec: str | None = None, dtype=None):
    """The parameters as the engine has them on a mesh, and with the shapes that the model has."""
    mesh = make_mesh(spec)
    model = transformer.abstract(type(Tiny().model), cfg)
    expand_model(model, mesh)
    params = nnx.state(model, nnx.Param)
    placed = restore_params(path, params, params, mesh)
    return placed, canonical_params(placed, mesh)


def assert_equal(params, tiny) -> None:
    want, got = named(state_of(tiny)), named(params)
    assert want.keys() == got.keys()
    for name, var in want.items():
        np.testing.assert_array_equal(var.get_value(), got[name].get_value())


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A model, and a directory with its State, saved from four devices."""
    tiny, path = Tiny(), tmp_path_factory.mktemp("orbax") / "state"
    model = transformer.abstract(type(tiny.model), tiny.cfg)
    split = place_params(state_of(tiny), nnx.state(model, nnx.Param), make_mesh("data=2,tensor=2"))
    save(path, split)
    return tiny, path


@pytest.mark.parametrize("spec", [None, "tensor=2", "tensor=4"])
def test_arrays_lie_on_another_mesh_than_they_were_saved_from(saved, spec):
    tiny, path = saved
    placed, params = restored(path, tiny.cfg, spec)
    assert_equal(params, tiny)
    devices = make_mesh(spec).devices.size
    down = named(placed)["layers.0.mlp.down.weight"].get_value()
    assert len(down.sharding.device_set) == devices
    assert down.addressable_shards[0].data.shape[0] == tiny.cfg.mlp // devices


def test_the_engine_serves_a_state_with_a_config(saved):
    tiny, path = saved
    with make_llm(path, config=tiny.cfg, mesh="tensor=2") as llm:
        tiny.assert_greedy(PROMPT, tokens(llm.generate(ids(PROMPT), greedy(8)))[0])
        assert llm.get_default_sampling_params().temperature == 1.0


def test_the_engine_serves_it_with_the_directory_of_such_a_model(saved, tmp_path):
    tiny, path = saved
    save_hf(tiny.model, tmp_path / "hf")
    with make_llm(str(path), config=str(tmp_path / "hf"), skip_tokenizer_init=True) as llm:
        tiny.assert_greedy(PROMPT, tokens(llm.generate(ids(PROMPT), greedy(4)))[0])
        assert llm.model_config.hf_config.hidden_size == tiny.cfg.embed


def test_a_module_that_trains_is_loaded_with_a_config(saved, tmp_path):
    tiny, path = saved
    save_hf(tiny.model, tmp_path / "hf")
    for config in (tiny.cfg, str(tmp_path / "hf"), made_config(tiny.cfg)):
        model = load(path, config=config)
        assert type(model) is type(tiny.model)
        assert_equal(nnx.state(model, nnx.Param), tiny)
        assert getattr(model, "source", None) == (config if isinstance(config, str) else None)
    save_hf(model, tmp_path / "again")
    assert_equal(nnx.state(load(tmp_path / "again"), nnx.Param), tiny)


def test_a_module_is_loaded_onto_a_mesh_in_a_dtype(saved):
    tiny, path = saved
    mesh = jax.make_mesh((2,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))
    model = load(path, "bfloat16", mesh, axes={"tensor": "tp"}, config=tiny.cfg)
    down = model.layers[0].mlp.down.weight.get_value()
    assert down.dtype == jnp.bfloat16 and down.sharding.spec == jax.sharding.PartitionSpec("tp", None)
    assert down.sharding.mesh == mesh


def test_the_engine_quantises_them_and_takes_keys_of_a_config(saved):
    tiny, path = saved
    with make_llm(path, config=made_config(tiny.cfg), quantization="int8") as llm:
        assert len(tokens(llm.generate(ids(PROMPT), greedy(4)))[0]) == 4
        assert jnp.dtype("int8") in {leaf.dtype for leaf in jax.tree.leaves(llm.params)}


@pytest.mark.parametrize("kind", ["dict", "pytree", "nested", "training"])
def test_trees_that_hold_the_parameters(tmp_path, kind):
    tiny = Tiny()
    state = state_of(tiny)
    moments = jax.tree.map(jnp.zeros_like, state)
    tree = {
        "dict": nnx.to_pure_dict(state),
        "pytree": state,
        "nested": {"params": nnx.to_pure_dict(state), "step": 3},
        "training": {"model": state, "opt_state": [{"mu": moments, "nu": moments}], "step": 3},
    }[kind]
    if kind == "pytree":
        with ocp.PyTreeCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "x", tree)
    else:
        save(tmp_path / "x", tree)
    assert_equal(restored(tmp_path / "x", tiny.cfg)[1], tiny)


def test_the_last_step_of_a_manager_or_one_that_is_named(tmp_path):
    first, last = Tiny(), Tiny(seed=1)
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        for step, tiny in ((9, first), (10, last)):
            items = {"params": state_of(tiny), "opt_state": {"mu": jnp.ones(3)}}
            manager.save(step, args=ocp.args.Composite(**{k: ocp.args.StandardSave(v) for k, v in items.items()}))
        manager.wait_until_finished()
    assert_equal(restored(tmp_path / "run", last.cfg)[1], last)
    assert_equal(restored(tmp_path / "run" / "9", first.cfg)[1], first)
    assert_equal(restored(tmp_path / "run" / "9" / "params", first.cfg)[1], first)


def test_they_become_the_dtype_of_the_configuration(saved):
    tiny, path = saved
    params = restored(path, Tiny(dtype=jnp.bfloat16).cfg)[1]
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}


def test_other_parameters_than_the_models_are_named(saved, tmp_path):
    tiny, path = saved
    for changed, said in (
        (Tiny(layers=tiny.cfg.layers * 2), "lacks layers.2.attn.k_norm.scale, .*Give the configuration"),
        (Tiny(mlp=40), r"mlp.down.weight has shape \[48, 32\], but the configuration implies \[40, 32\]"),
        (Tiny(qk_norm=False), "has more parameters than the model: layers.0.attn.k_norm.scale"),
    ):
        with pytest.raises(ModelFormatError, match=said):
            restored(path, changed.cfg)
    state = nnx.to_pure_dict(state_of(tiny))
    save(tmp_path / "two", {"actor": state, "critic": state})
    with pytest.raises(ModelFormatError, match="several models: actor, critic"):
        restored(tmp_path / "two", tiny.cfg)


def test_a_damaged_directory_is_told(tmp_path):
    """In a process of its own: Orbax leaves reads of other arrays behind, which warn when they are collected."""
    tiny = Tiny()
    save(tmp_path / "x", state_of(tiny))
    save_hf(tiny.model, tmp_path / "hf")
    for file in (tmp_path / "x" / "ocdbt.process_0").rglob("d/*"):
        file.write_bytes(file.read_bytes()[:2000])
    code = "import sys; from jaxllm import LLM; LLM(sys.argv[1], config=sys.argv[2], skip_tokenizer_init=True)"
    command = [sys.executable, "-c", code, tmp_path / "x", tmp_path / "hf"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert re.search("ModelFormatError: .*x is incomplete or damaged: .* Save it again", done.stderr)


def test_config_is_asked_for_and_is_for_nothing_else(saved, tmp_path):
    tiny, path = saved
    with pytest.raises(ModelFormatError, match=r"Orbax checkpoint: arrays without .*LLM\(path, config=...\)"):
        LLM(path)
    for model in (tiny.model, None):
        with pytest.raises(ValueError, match="config= is for a directory that Orbax has written"):
            LLM(model, config=tiny.cfg)
        with pytest.raises(ValueError, match="config= is for a directory that Orbax has written"):
            load(None if model is None else tmp_path, config=tiny.cfg)
    for make in (LLM, load):
        with pytest.raises(TypeError, match="config is an int; give a Config"):
            make(path, config=3)
    with pytest.raises(ModelFormatError, match=r"jaxllm.models.load\(path, config=...\)"):
        load(path)
    with pytest.raises(ValueError, match="revision='main' is of a model on the hub"):
        load(path, config=tiny.cfg, revision="main")
    with pytest.raises(ValueError, match="put it into config"):
        LLM(path, config=tiny.cfg, task="embed")
    with pytest.raises(ValueError, match="record notes neither"):
        LLM(path, config=tiny.cfg, record=tmp_path / "record")
    with pytest.raises(ValueError, match="an engine on one host"):
        LLM(path, config=tiny.cfg, cluster="auto")


def test_a_missing_package_is_named(saved, monkeypatch):
    tiny, path = saved
    monkeypatch.setitem(__import__("sys").modules, "orbax.checkpoint", None)
    with pytest.raises(ImportError, match=r"pip install 'jaxllm\[orbax\]'"):
        restored(path, tiny.cfg)
