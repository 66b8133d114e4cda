"""Functions, Linen modules and bridged ones are served with a `FunctionShape`, or refused with the reason."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from jaxllm import LLM, FunctionShape
from jaxllm.models.cache import Dense
from jaxllm.models.context import StepContext
from tests.tiny import clean, make_llm, prompts_of, served_logprobs

SHAPE = FunctionShape(vocab=96, embed=32, num_layers=2, heads=4, kv_heads=2, head_dim=8, mlp=64, max_len=96)
(PROMPT,) = prompts_of([21])


def attend(x, q, kv, ctx, cache):
    """Attention whose values tell the positions."""
    k, v = jnp.split(kv.reshape(*x.shape[:-1], 2, 16), 2, axis=-1)
    v = v + jnp.cos(ctx.positions.astype(jnp.float32))[..., None, None] * jnp.ones_like(v)
    out, cache = cache.attend(q.reshape(*x.shape[:-1], 4, 8), k, v, scale=8**-0.5)
    return out.reshape(x.shape), cache


def forward(params, tokens, ctx, caches):
    x, caches = params["table"][tokens], caches.copy()
    for i, layer in enumerate(params["layers"]):
        out, caches[i] = attend(x, x @ layer["q"], x @ layer["kv"], ctx, caches[i])
        x = x + out
        x = x + jnp.tanh(x @ layer["up"]) @ layer["down"]
    return x, caches


def head(params, hidden):
    return hidden @ params["table"].T * 0.1


def random_params(seed):
    keys = iter(jax.random.split(jax.random.key(seed), 9))
    sizes = {"q": (32, 32), "kv": (32, 32), "up": (32, 64), "down": (64, 32)}
    layers = [{name: jax.random.normal(next(keys), size) * 0.2 for name, size in sizes.items()} for _ in range(2)]
    return {"table": jax.random.normal(next(keys), (96, 32)), "layers": layers}


class LinenModel(linen.Module):
    def setup(self):
        self.table = linen.Embed(96, 32)
        self.qs = [linen.Dense(32, name=f"q{i}") for i in range(2)]
        self.kvs = [linen.Dense(32, name=f"kv{i}") for i in range(2)]

    def __call__(self, tokens, ctx, caches):
        x, caches = self.table(tokens), caches.copy()
        for i, (q, kv) in enumerate(zip(self.qs, self.kvs, strict=True)):
            out, caches[i] = attend(x, q(x), kv(x), ctx, caches[i])
            x = x + out
        return x, caches

    def logits(self, hidden, ctx=None):
        return self.table.attend(hidden)


def assert_served(llm, call, logits) -> None:
    tokens = jnp.asarray([PROMPT], jnp.int32)
    hidden, _ = call(tokens, StepContext.of(tokens), [Dense()] * 2)
    logprobs = np.asarray(jax.nn.log_softmax(logits(hidden)[0]))[np.arange(len(PROMPT) - 1), PROMPT[1:]]
    np.testing.assert_allclose(served_logprobs(llm, PROMPT), logprobs, rtol=0, atol=1e-5)
    clean(llm)


def test_a_function():
    params, other = random_params(1), random_params(2)
    with LLM(forward, params, shape=SHAPE, head=head, max_num_seqs=4, max_num_batched_tokens=16, num_blocks=64) as llm:
        for given in (params, other):
            llm.update_params(given)
            assert_served(llm, lambda *a, p=given: forward(p, *a), lambda h, p=given: head(p, h))
        llm.update_params(llm.params)


@pytest.fixture
def linen_variables():
    tokens = jnp.ones((1, 8), jnp.int32)
    return LinenModel().init(jax.random.key(3), tokens, StepContext.of(tokens), [Dense()] * 2)


def test_a_linen_module(linen_variables):
    module = LinenModel()
    with make_llm(module, params=linen_variables, shape=SHAPE) as llm:
        for variables in (linen_variables, jax.tree.map(lambda x: x * 1.5, linen_variables)):
            llm.update_params(variables)
            bound = module.bind(variables)
            assert_served(llm, bound, bound.logits)


def test_a_bridged_linen_module():
    tokens = jnp.ones((1, 8), jnp.int32)
    model = nnx.bridge.ToNNX(LinenModel(), rngs=nnx.Rngs(4)).lazy_init(tokens, StepContext.of(tokens), [Dense()] * 2)
    with make_llm(model, shape=SHAPE) as llm:
        for _ in range(2):
            assert_served(llm, model, model.logits)
            nnx.update(model, jax.tree.map(lambda x: x * 1.5, nnx.state(model, nnx.Param)))
            llm.update_params(nnx.state(model, nnx.Param))
    with pytest.raises(TypeError, match=r"ToNNX.cfg must be .* LLM\(module, shape=jaxllm.FunctionShape"):
        LLM(model)


def other_width(params, tokens, ctx, caches):
    hidden, caches = forward(params, tokens, ctx, caches)
    return hidden[..., :-1], caches


def no_head(params, hidden):
    return jnp.zeros((*hidden.shape[:-1], 96))


def no_context(params, tokens, caches):
    return forward(params, tokens, StepContext.of(tokens), caches)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"shape": None}, TypeError, r"shape is None; a function, .* needs shape=jaxllm.FunctionShape"),
        ({"head": None}, TypeError, r"head is None; give head\(params, hidden\)"),
        ({"params": None}, TypeError, r"params None; give LLM\(fn, params, shape=..., head=...\)"),
        ({"model": 3}, TypeError, r"model is an int and params a dict"),
        (
            {"model": other_width, "head": no_head},
            ValueError,
            r"other_width makes .* hidden states \(1, 31\) .* \[1, 32\]",
        ),
        ({"model": no_context}, ValueError, r"no_context can't be served: .* TypeError: no_context\(\) takes 3"),
        ({"params": {}}, ValueError, r"forward can't be served: .* raises KeyError: 'table'"),
        ({"params": jnp.zeros(3)}, ValueError, r"the parameters need other names than \[''\]; put them in a dict"),
        (
            {"params": random_params(1) | {"s": 0.5}},
            ValueError,
            r"parameter s is a float; give an array, or leave it out",
        ),
        ({"head": lambda p, h: h}, ValueError, r"logits \(1, 32\); expected .* \[1, 96\]"),
    ],
)
def test_what_can_not_be_served_is_refused(arguments, error, message):
    given = {"model": forward, "params": random_params(1), "shape": SHAPE, "head": head} | arguments
    with pytest.raises(error, match=message):
        LLM(**given)


def test_sizes_are_checked():
    with pytest.raises(ValueError, match="vocab=0"):
        FunctionShape(vocab=0, embed=32, num_layers=2, heads=4, kv_heads=2, head_dim=8, mlp=64, max_len=96)
    with pytest.raises(ValueError, match="heads=4 is not a multiple of kv_heads=3"):
        FunctionShape(vocab=9, embed=32, num_layers=2, heads=4, kv_heads=3, head_dim=8, mlp=64, max_len=96)
