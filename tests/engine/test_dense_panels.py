"""A model that a lone CPU has read from files has its dense weights in the order in which products read them, and
nobody sees it but they."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxllm.checkpoint.placement import expansion_of, named
from jaxllm.models import load, save_hf
from jaxllm.models.context import StepContext
from jaxllm.models.linear import Linear
from jaxllm.models.panel_linear import PanelLinear
from jaxllm.pallas_kernels import native
from tests.checkpoints import write_checkpoint
from tests.mixtures import write_mixture
from tests.tiny import Tiny, clean, greedy, ids, make_llm, prompts_of, served_logprobs, tokens

pytestmark = pytest.mark.skipif(not native.is_built(), reason="not built: python -m jaxllm.pallas_kernels.native.build")

PROMPTS = prompts_of((5, 17, 2))


@pytest.fixture(scope="module")
def tiny():
    return Tiny(mlp=64)


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "hf"
    save_hf(tiny.model, path)
    return path


@pytest.fixture(scope="module")
def llm(folder):
    with make_llm(folder, dtype="float32", skip_tokenizer_init=True) as llm:
        yield llm
        clean(llm)


def products(model):
    return {path: node for path, node in nnx.iter_graph(model) if isinstance(node, Linear)}


def assert_params(params, wanted):
    """That they are those, with the same axes and without a trace of panels."""
    params, wanted = named(params), named(wanted)
    assert params.keys() == wanted.keys()
    for name, variable in params.items():
        assert variable.axes == wanted[name].axes and expansion_of(variable) is None
        np.testing.assert_array_equal(variable.get_value(), wanted[name].get_value())


def test_all_products_lie_in_panels(llm, tiny):
    found = products(llm.module)
    assert len(found) == 4 * 2 + 1 and {type(node) for node in found.values()} == {PanelLinear}
    assert found["lm_head",].weight.get_value().shape == (3, 32, 32)
    for prompt, output in zip(PROMPTS, tokens(llm.generate(ids(*PROMPTS), greedy(12))), strict=True):
        tiny.assert_greedy(prompt, output)


def test_parameters_are_those_of_the_files(llm, tiny):
    assert_params(llm.params, nnx.state(tiny.model, nnx.Param))


def test_the_caller_gives_others_and_takes_them_back(llm, tiny):
    other = Tiny(seed=1, mlp=64)
    llm.update_params(nnx.to_pure_dict(nnx.state(other.model, nnx.Param)))
    other.assert_greedy(PROMPTS[1], tokens(llm.generate(ids(PROMPTS[1]), greedy(12)))[0])
    assert_params(llm.params, nnx.state(other.model, nnx.Param))
    llm.update_params(jax.tree.map(np.asarray, nnx.state(tiny.model, nnx.Param)))
    tiny.assert_greedy(PROMPTS[1], tokens(llm.generate(ids(PROMPTS[1]), greedy(12)))[0])


def test_wrong_parameters_are_told_of_in_the_models_shapes(llm, tiny):
    params = nnx.to_pure_dict(nnx.state(tiny.model, nnx.Param))
    params["lm_head"]["weight"] = np.zeros((32, 95), np.float32)
    with pytest.raises(
        ValueError, match=r"lm_head.weight has shape \(32, 95\), but the model's config wants \(32, 96\)"
    ):
        llm.update_params(params)


def test_parameters_of_another_dtype_are_cast_or_refused(llm, tiny):
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), nnx.state(tiny.model, nnx.Param))
    with pytest.raises(ValueError, match="is bfloat16, the engine's is float32; cast it first"):
        llm.update_params(half, cast=False)
    llm.update_params(half)
    assert llm.params["lm_head"]["weight"].get_value().dtype == jnp.float32
    llm.update_params(nnx.state(tiny.model, nnx.Param))


def test_an_engine_that_sleeps_gives_their_memory_back_and_wakes(llm, tiny):
    llm.sleep(level=1)
    llm.wake_up()
    tiny.assert_greedy(PROMPTS[0], tokens(llm.generate(ids(PROMPTS[0]), greedy(12)))[0])


def test_its_module_is_saved_as_it_was_read(llm, tiny, tmp_path):
    save_hf(llm.module, tmp_path / "again")
    assert_params(nnx.state(load(tmp_path / "again"), nnx.Param), nnx.state(tiny.model, nnx.Param))


def test_a_callers_own_arrays_are_shared_and_stay_as_they_are(tiny):
    with make_llm(tiny.model) as llm:
        assert {type(node) for node in products(llm.module).values()} == {Linear}


def test_what_fits_no_panel_stays_as_it_is(tmp_path):
    write_checkpoint(tmp_path, hidden_size=32, head_dim=8, num_attention_heads=4, num_key_value_heads=1)
    with make_llm(tmp_path, skip_tokenizer_init=True) as llm:
        kinds = {path[-1]: type(node) for path, node in products(llm.module).items()}
        assert kinds == {"qkv": Linear, "o": PanelLinear, "gate_up": Linear, "down": PanelLinear, "lm_head": Linear}
        assert len(tokens(llm.generate(ids([3, 5]), greedy(4)))[0]) == 4


def test_a_gate_that_ends_within_a_panel(tmp_path):
    tiny = Tiny(mlp=48)  # of 96 columns
    save_hf(tiny.model, tmp_path / "hf")
    with make_llm(tmp_path / "hf", dtype="float32", skip_tokenizer_init=True) as llm:
        assert type(llm.module.layers[0].mlp.gate_up) is PanelLinear
        tiny.assert_greedy(PROMPTS[1], tokens(llm.generate(ids(PROMPTS[1]), greedy(8)))[0])


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_beside_products_that_are_quantised_while_they_load(load_format, folder, tiny):
    options = {"quantization": "int8", "load_format": load_format, "skip_tokenizer_init": True}
    with make_llm(folder, **options) as llm:
        assert type(llm.module.lm_head) is PanelLinear
        head = llm.params["lm_head"]["weight"]
        assert len(tokens(llm.generate(ids([3, 5]), greedy(4)))[0]) == 4
    assert head.axes == ("embed", "vocab") and head.get_value().shape == (32, 96)
    if load_format == "auto":
        np.testing.assert_array_equal(head.get_value(), tiny.model.lm_head.weight.get_value())


def test_several_devices_divide_the_weights_as_they_were(folder, tiny):
    with make_llm(folder, dtype="float32", mesh="tensor=2", skip_tokenizer_init=True) as llm:
        assert {type(node) for node in products(llm.module).values()} == {Linear}
        tiny.assert_greedy(PROMPTS[0], tokens(llm.generate(ids(PROMPTS[0]), greedy(4)))[0])


@pytest.mark.parametrize("family", ["Qwen3Moe", pytest.param("GptOss", marks=pytest.mark.slow)])
def test_experts_do_too(family, tmp_path):
    write_mixture(tmp_path, family)
    read = load(tmp_path, "float32")
    prompt = list(range(3, 20))
    with make_llm(read) as plain, make_llm(tmp_path, dtype="float32", skip_tokenizer_init=True) as llm:
        experts = llm.module.layers[1].mlp
        assert type(experts.gate_up) is PanelLinear and experts.down.weight.get_value().shape == (4, 1, 32, 32)
        np.testing.assert_allclose(served_logprobs(llm, prompt), served_logprobs(plain, prompt), atol=1e-5)
        assert_params(llm.params, nnx.state(read, nnx.Param))
        x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 1, 32)), jnp.float32)
        np.testing.assert_allclose(
            *(by_every_expert(one.module.layers[1].mlp.gate_up, x) for one in (llm, plain)), atol=1e-5
        )


def by_every_expert(linear, x):
    return linear(x, StepContext.of(jnp.zeros((1, 1), jnp.int32)))
