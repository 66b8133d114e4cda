"""A user's own module is served as it is, class and attributes included, or refused with the reason."""

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
import tokenizers
from flax import nnx

from jaxllm import LLM
from jaxllm.default_model import DEFAULT_MODEL
from jaxllm.engine.model_source import model_source
from jaxllm.models import qwen3, transformer
from jaxllm.models.cache_spec import CacheSpec
from jaxllm.models.layers import LayerSpec, RMSNorm, Rope
from jaxllm.models.linear import Linear
from tests.tiny import Tiny, clean, greedy, ids, logprobs_of, make_llm, prompts_of, served_logprobs, tokens

CFG = Tiny().cfg


class ParallelLayer(transformer.DecoderLayer):
    """Attention and the MLP see the same input."""

    def __call__(self, x, ctx, sin_cos, cache):
        h = self.attn_norm(x)
        attended, cache = self.attn(h, ctx, sin_cos, cache)
        return x + attended + self.mlp(h, ctx), cache


class Custom(qwen3.Model):
    """Another block, an attribute that counts, a parameter of its own without axes, and another method."""

    Layer = ParallelLayer

    def __init__(self, cfg, *, rngs):
        super().__init__(cfg, rngs=rngs)
        self.gain = 3.0
        self.adapter = nnx.Param(jax.random.normal(rngs.params(), (cfg.vocab,)) * 2)

    def logits(self, hidden, ctx):
        logits = super().logits(hidden, ctx) * self.gain
        return logits + jnp.broadcast_to(self.adapter[...], logits.shape)


@pytest.mark.parametrize("mesh", [None, "tensor=2"])
def test_a_subclass_is_served_as_it_is(mesh):
    model, other = (Custom(CFG, rngs=nnx.Rngs(params=seed)) for seed in (1, 2))
    (prompt,) = prompts_of([21])
    before = nnx.graphdef(model), jax.tree.leaves(nnx.state(model)), model.cfg
    with make_llm(model, max_model_len=64, mesh=mesh) as llm:
        np.testing.assert_allclose(served_logprobs(llm, prompt), logprobs_of(model, prompt), rtol=1e-4, atol=1e-4)
        llm.update_params(nnx.state(other, nnx.Param))
        np.testing.assert_allclose(served_logprobs(llm, prompt), logprobs_of(other, prompt), rtol=1e-4, atol=1e-4)
        assert llm.engine.config.max_model_len == 64
        clean(llm)
    assert before[0] == nnx.graphdef(model) and model.cfg is before[2] and model.cfg.max_len == CFG.max_len
    assert all(a is b for a, b in zip(before[1], jax.tree.leaves(nnx.state(model)), strict=True))
    plain = qwen3.Model(CFG, rngs=nnx.Rngs(params=1))
    assert np.abs(logprobs_of(plain, prompt) - logprobs_of(model, prompt)).max() > 0.5  # it is another model


def test_a_module_in_another_dtype_than_its_configuration_says(tiny):
    model = nnx.clone(tiny.model)
    nnx.update(model, jax.tree.map(lambda x: x.astype(jnp.bfloat16), nnx.state(model)))
    with make_llm(model) as llm:
        assert len(tokens(llm.generate(ids([1, 2, 3]), greedy(4)))[0]) == 4
        assert {pool.dtype for pool in llm.engine.runner.executor.state.kv_pools} == {jnp.dtype(jnp.bfloat16)}


class OtherLogits(qwen3.Model):
    def logits(self, hidden, ctx):
        return super().logits(hidden, ctx).astype(jnp.bfloat16)


class OtherCall(qwen3.Model):
    def __call__(self, tokens):
        return tokens


class Raises(qwen3.Model):
    def embed_tokens(self, tokens, ctx):
        raise KeyError("nowhere")


class NoAttention(qwen3.Model):
    def __call__(self, tokens, ctx, caches):
        return self.embed_tokens(tokens, ctx), caches


class SaysOtherwise(qwen3.Model):
    def cache_specs(self):
        return [(CacheSpec.keys_and_values(4, 16),)] * 2


class KeepsLess(qwen3.Model):
    def cache_specs(self):
        return [(CacheSpec.keys_and_values(2, 16, window=8),)] * 2


@pytest.mark.parametrize(
    ("module", "error", "message"),
    [
        (KeepsLess, ValueError, "a layer attends to all tokens, and its cache keeps 8, as its cache_specs say"),
        (OtherLogits, ValueError, r"OtherLogits makes logits of bfloat16; expected float32"),
        (OtherCall, TypeError, r"OtherCall.__call__ can't be called as __call__\(tokens, ctx, caches\)"),
        (Raises, ValueError, "Raises can't be served: .* raises KeyError: 'nowhere'"),
        (NoAttention, ValueError, r"gave its 2 caches 0 times keys of shapes \[\]"),
    ],
)
def test_what_can_not_be_served_is_refused(module, error, message):
    with pytest.raises(error, match=message):
        LLM(module(CFG, rngs=nnx.Rngs(params=0)))


def test_windows_may_be_wider_than_the_configurations():
    model = Tiny(layers=(LayerSpec(rope=Rope(theta=1e4), window=8),) * 3).model
    for layer, window in zip(model.layers, (None, 40, 4), strict=True):
        layer.attn.window = window
    (prompt,) = prompts_of([90])
    with make_llm(model) as llm:  # in chunks, behind which blocks that nobody reads any more are given up
        np.testing.assert_allclose(served_logprobs(llm, prompt), logprobs_of(model, prompt), rtol=0, atol=1e-5)


class HalfNorm(RMSNorm):
    def __call__(self, x, ctx=None):
        return super().__call__(x, ctx) / 2


class HalfProduct(Linear):
    def __call__(self, x, ctx, **options):
        return super().__call__(x, ctx, **options) / 2


def test_calls_that_were_overridden_come_before_what_is_fused():
    model, same = Tiny().model, Tiny().model
    for layer, of_same in zip(model.layers, same.layers, strict=True):
        norm, product = layer.mlp_norm, layer.mlp.gate_up
        layer.mlp_norm = HalfNorm(CFG.embed, norm.eps, dtype=CFG.dtype)
        layer.mlp_norm.scale = norm.scale
        layer.mlp.gate_up = HalfProduct(product.shape, product.weight)
        for weight in (of_same.mlp_norm.scale, of_same.mlp.gate_up.weight):
            weight.set_value(weight[...] / 2)
    (prompt,) = prompts_of([21])
    np.testing.assert_allclose(logprobs_of(model, prompt), logprobs_of(same, prompt), rtol=0, atol=1e-5)
    with make_llm(model) as llm:
        np.testing.assert_allclose(served_logprobs(llm, prompt), logprobs_of(same, prompt), rtol=0, atol=1e-5)


class Rematerialised(qwen3.Model):
    class Layer(transformer.DecoderLayer):
        def __call__(self, x, ctx, sin_cos, cache):
            def call(layer, x, cache):
                return transformer.DecoderLayer.__call__(layer, x, ctx, sin_cos, cache)

            return nnx.remat(call)(self, x, cache)


def test_a_module_that_computes_its_layers_again_as_it_trains(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # JAX fills pytrees with None for a while
    model, (prompt,) = Rematerialised(CFG, rngs=nnx.Rngs(params=1)), prompts_of([30])
    with make_llm(model) as llm:
        np.testing.assert_allclose(served_logprobs(llm, prompt), logprobs_of(model, prompt), rtol=0, atol=1e-5)


def test_a_module_of_another_interface_is_refused():
    with pytest.raises(TypeError, match=r"Linear.cfg must be a dataclass with vocab, embed, .*dtype"):
        LLM(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"keys of shapes \[\(1, 2, 16\)\] .* of \[\(1, 4, 16\)\]"):
        LLM(SaysOtherwise(CFG, rngs=nnx.Rngs(params=0)))


def words(count, *added):
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(count)}, unk_token="w0"))
    backend.add_special_tokens(list(added))
    return backend


class Slow:
    """A tokenizer that is an object of the user's."""

    eos_token_id = 3

    def __init__(self, vocab_size, **fields):
        self.vocab_size = vocab_size
        self.__dict__ |= fields

    def encode(self, text):
        return [0]

    def decode(self, ids):
        return ""


class Ends(Slow):
    eos_token_id = 4096


@pytest.mark.parametrize(
    "tokenizer",
    [words(4096), words(4096, "<image>", "<audio>"), words(2100), Slow(4096)],
    ids=["as many", "added ones", "fewer", "slow"],
)
def test_a_tokenizer_that_fits(tokenizer, caplog):
    """The embedded model has 4096 tokens; more may be padding, and added ones may be others'."""
    assert model_source(None, "auto", "cpu", tokenizer).cfg.vocab == 4096
    assert not caplog.messages


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        (words(4097), "embedded: the tokenizer has 4097 tokens, but the model only 4096. It is another model's"),
        (Slow(5000), "has 5000 tokens"),
        (Slow(lambda: 5000), "has 5000 tokens"),
        (Ends(4000), "ends texts by token 4096, but the model has 4096 only, 0 to 4095"),
    ],
    ids=["one more", "slow", "slow with a function", "ends outside"],
)
def test_a_tokenizer_of_another_model(tokenizer, message):
    with pytest.raises(ValueError, match=message):
        model_source(None, "auto", "cpu", tokenizer)


def test_what_may_be_another_models_tokenizer_is_said(caplog):
    model_source(DEFAULT_MODEL, "auto", "cpu", words(2000))
    assert caplog.messages == ["the tokenizer has 2000 tokens and the model 4096: it may be another model's"]
    model_source(Tiny().model, "auto", "cpu", words(4096))  # the caller's own model is not refused
    assert "the tokenizer has 4096 tokens, but the model only" in caplog.messages[1]
