"""`check` names the first layer that parts from a reference, of whatever kind."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxllm import LLM
from jaxllm.models import check
from jaxllm.models.cache import Dense
from jaxllm.models.context import StepContext
from tests.hf_models import checkpoint
from tests.tiny import Tiny

TOKENS = [3, 14, 15, 92, 65, 35]


@pytest.fixture
def changed(tiny):
    """The tiny model with another last layer."""
    model = nnx.clone(tiny.model)
    norm = model.layers[1].mlp_norm
    norm.scale.set_value(norm.scale[...] * 1.01)
    return model


def test_a_module_beside_another(tiny, changed):
    before = jax.tree.leaves(nnx.state(tiny.model)), type(tiny.model.layers[0])
    result = check(tiny.model, changed, TOKENS)
    assert [output.name for output in result.outputs] == ["embed", "layers.0", "layers.1", "logits"]
    assert result.first is result.outputs[2] and result.outputs[1].largest == 0
    assert 1e-4 < result.first.largest / result.first.scale < 1
    assert str(result).endswith("the first to differ is layers.1") and "layers.1     differs by" in str(result)
    assert check(tiny.model, changed, TOKENS, tolerance=0.5).first is None
    assert str(check(tiny.model, tiny.model, TOKENS)).endswith("the models agree")
    assert (jax.tree.leaves(nnx.state(tiny.model)), type(tiny.model.layers[0])) == before
    changed.layers[0].mlp_norm.scale.set_value(jnp.full(32, jnp.nan))
    assert check(tiny.model, changed, TOKENS).first.name == "layers.0"


def test_what_an_engine_serves(tiny, changed):
    """On a mesh that repeats its KV heads."""
    with LLM(tiny.model, mesh="tensor=4", max_num_seqs=2, max_num_batched_tokens=16, num_blocks=16) as llm:
        assert check(llm, tiny.model, TOKENS).first is None
        assert check(llm, changed, TOKENS).first.name == "layers.1"


def test_functions_and_arrays(tiny, changed):
    ctx = StepContext.of(jnp.asarray([TOKENS]))

    def layer(i):
        one, spec = changed.layers[i], changed.cfg.layers[i]
        sin_cos = spec.rope.sin_cos(ctx.positions, changed.cfg.head_dim, changed.cfg.max_len)
        return lambda x: one(x[None], ctx, sin_cos, Dense())[0][0]

    result = check(tiny.model, [layer(0), layer(1)], TOKENS)
    assert [output.name for output in result.outputs] == ["layers.0", "layers.1"]
    assert result.first.name == "layers.1"
    assert check(tiny.model, {"logits": tiny.logits(TOKENS)}, TOKENS).first is None


def test_a_model_of_transformers(tmp_path):
    pytest.importorskip("torch")
    reference = checkpoint(tmp_path, "Qwen3")
    with LLM(
        tmp_path, skip_tokenizer_init=True, dtype="float32", max_num_seqs=2, max_num_batched_tokens=16, num_blocks=16
    ) as llm:
        result = check(llm, reference, TOKENS)
        assert [output.name for output in result.outputs] == ["embed", *(f"layers.{i}" for i in range(3)), "logits"]
        assert result.first is None
        reference.model.layers[1].mlp.down_proj.weight.data *= 1.01
        assert check(llm, reference, TOKENS).first.name == "layers.1"


@pytest.mark.parametrize(
    ("reference", "error", "message"),
    [
        ([jnp.tanh], ValueError, "1 functions are given for 2 layers"),
        (
            {"layers.7": np.zeros(3)},
            ValueError,
            "the reference has layers.7, which the model lacks; it has embed, layers.0",
        ),
        ({"logits": np.zeros((2, 96))}, ValueError, r"logits has the shape \(6, 96\), and the reference's \(2, 96\)"),
        (3, TypeError, "reference is int; give a model of transformers"),
    ],
)
def test_references_that_do_not_fit(tiny, reference, error, message):
    with pytest.raises(error, match=message):
        check(tiny.model, reference, TOKENS)


def test_models_that_have_no_layers(tiny):
    with pytest.raises(TypeError, match="model is Linear; check needs an NNX module with layers"):
        check(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), tiny.model, TOKENS)
    with pytest.raises(ValueError, match=r"the shape \(1, 6\); give the ids of one text"):
        check(Tiny().model, tiny.model, [TOKENS])
