"""Texts that are packed into rows, and padded ones: what `Dense` makes of each is what it makes of it alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxllm.models import gemma2, gpt_oss, qwen3
from jaxllm.models.cache import Dense
from jaxllm.models.context import StepContext
from jaxllm.models.state_cache import dense_caches

HF = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "intermediate_size": 48, "max_position_embeddings": 64, "rope_theta": 1e4,
}  # fmt: skip
MODELS = {
    "plain": (qwen3, {}),
    "windows and soft caps": (
        gemma2,
        {
            "sliding_window": 3,
            "layer_types": ["sliding_attention", "full_attention"],
            "attn_logit_softcapping": 20.0,
            "final_logit_softcapping": 10.0,
            "query_pre_attn_scalar": 8,
            "hidden_activation": "gelu_pytorch_tanh",
        },
    ),
    "experts and sinks": (
        gpt_oss,
        {
            "sliding_window": 3,
            "layer_types": ["sliding_attention", "full_attention"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rms_norm_eps": 1e-5,
            "swiglu_limit": 7.0,
        },
    ),
}
TEXTS = [np.arange(1, 6), np.arange(20, 31), np.arange(40, 44)]


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    module, more = MODELS[request.param]
    return module.Model(module.Config.from_hf(HF | more), rngs=nnx.Rngs(1))


def forward(model, tokens, segment_ids=None, mask=None):
    ctx = StepContext.of(tokens, segment_ids=segment_ids)
    caches = [Dense(segment_ids=segment_ids, mask=mask)] * model.cfg.num_layers
    return model.logits(model(tokens, ctx, caches)[0], ctx)


def logits(model, tokens, **options):
    return nnx.jit(forward)(model, jnp.asarray(tokens, jnp.int32), **options)


def packed() -> tuple[np.ndarray, np.ndarray]:
    """Two rows: padding on the right of one, on the left of the other."""
    tokens, segments = np.zeros((2, 20), np.int32), np.zeros((2, 20), np.int32)
    tokens[0, :16], segments[0, :16] = np.concatenate(TEXTS[:2]), [1] * 5 + [2] * 11
    tokens[1, 16:], segments[1, 16:] = TEXTS[2], 7
    return tokens, segments


def test_packed_texts_do_not_see_each_other(model):
    tokens, segments = packed()
    both = logits(model, tokens, segment_ids=jnp.asarray(segments))
    for row, place, text in ((0, slice(0, 5), TEXTS[0]), (0, slice(5, 16), TEXTS[1]), (1, slice(16, 20), TEXTS[2])):
        np.testing.assert_allclose(both[row, place], logits(model, text[None])[0], atol=2e-5)


def test_gradients_are_those_of_the_texts_apart(model):
    graph, params = nnx.split(model, nnx.Param)
    tokens, segments = packed()

    def nll(params, tokens, segments) -> jax.Array:
        says = jax.nn.log_softmax(forward(nnx.merge(graph, params), tokens, segments))
        chosen = jnp.take_along_axis(says[:, :-1], tokens[:, 1:, None], axis=-1)[..., 0]
        return -jnp.sum(jnp.where((segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0), chosen, 0))

    grad = jax.jit(jax.grad(nll))
    together = grad(params, jnp.asarray(tokens), jnp.asarray(segments))
    apart = [grad(params, jnp.asarray(text[None], jnp.int32), jnp.ones((1, len(text)), jnp.int32)) for text in TEXTS]
    summed = jax.tree.map(lambda *each: sum(each), *apart)
    for got, want in zip(jax.tree.leaves(together), jax.tree.leaves(summed), strict=True):
        np.testing.assert_allclose(got, want, atol=3e-4, rtol=1e-3)
        assert np.isfinite(got).all()


def test_a_mask_hides_keys(model):
    """A prefix that the rest may not see is as good as other tokens there."""
    tokens = np.concatenate(TEXTS[:2])[None]
    mask = np.ones((1, 16, 16), bool)
    mask[:, 5:, :5] = False
    other = tokens.copy()
    other[0, :5] = 50
    hidden, changed = (logits(model, each, mask=jnp.asarray(mask)) for each in (tokens, other))
    np.testing.assert_array_equal(hidden[0, 5:], changed[0, 5:])
    assert not np.allclose(hidden[0, 5:], logits(model, tokens)[0, 5:])
    nothing = logits(model, tokens, mask=jnp.zeros((1, 16, 16), bool))  # a query that sees no key makes no NaN
    assert np.isfinite(nothing).all()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"mask": jnp.ones((3, 3), bool)}, r"mask has the shape \(3, 3\); it is \[batch, .* here \(2, 3, 3\)"),
        ({"mask": jnp.ones((2, 3, 2), bool)}, r"mask has the shape \(2, 3, 2\)"),
        ({"mask": jnp.ones((2, 3, 3))}, "mask has the dtype float32; it is bool"),
        ({"segment_ids": jnp.ones((2, 4), jnp.int32)}, r"segment_ids have the shape \(2, 4\); .* here \(2, 3\)"),
        ({"segment_ids": jnp.ones(3, jnp.int32)}, r"segment_ids have the shape \(3,\)"),
    ],
)
@pytest.mark.parametrize("soft_cap", [None, 5.0])
def test_what_does_not_fit_a_batch_is_named(given, says, soft_cap):
    q, kv, cache = jnp.zeros((2, 3, 4, 8)), jnp.zeros((2, 3, 2, 8)), Dense()
    for name, array in given.items():
        object.__setattr__(cache, name, array)  # as for users, whose annotations do not run
    with pytest.raises(ValueError, match=says):
        cache.attend(q, kv, kv, scale=1.0, soft_cap=soft_cap)


def test_positions_of_packed_rows():
    tokens, segments = packed()
    ctx = StepContext.of(jnp.asarray(tokens), segment_ids=jnp.asarray(segments))
    np.testing.assert_array_equal(ctx.positions[0], [*range(5), *range(11), *range(4)])
    np.testing.assert_array_equal(ctx.positions[1], [*range(16), *range(4)])
    np.testing.assert_array_equal(ctx.is_token, segments > 0)


def test_segments_that_dense_is_not_given(tiny):
    """Would be of no effect, and say nothing."""
    ids = jnp.ones((1, 4), jnp.int32)
    ctx = StepContext.of(ids, segment_ids=ids)
    with pytest.raises(ValueError, match=r"take Dense\(segment_ids=segment_ids\), too"):
        tiny.model(ids, ctx, dense_caches(tiny.model))
