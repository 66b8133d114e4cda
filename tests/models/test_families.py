"""Families without an engine: whole dense forward passes against transformers, gradients, dtypes, refused mixtures."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxllm import LLM
from jaxllm.checkpoint.config import read_config
from jaxllm.checkpoint.formats import open_checkpoint
from jaxllm.checkpoint.loader import load_params
from jaxllm.models import gemma2, gemma3, gpt_oss, llama, llama4, mistral, opt, phi3, qwen2, qwen3, transformer
from jaxllm.models.cache import Dense, Paged
from jaxllm.models.context import StepContext
from jaxllm.models.layers import LayerSpec, PlainMLP, RMSNorm
from jaxllm.models.moe import Activation, Experts, Routing
from jaxllm.models.registry import model_for
from jaxllm.models.rope import LongRope, Rope
from jaxllm.models.transformer import layers_of
from jaxllm.pallas_kernels.paged_attention import PagedBatch, kv_shape
from jaxllm.sharding.mesh import make_mesh
from tests.hf_models import LLAMA3, LONGROPE, YARN, checkpoint, logits
from tests.seldom import all_but

LENGTH = 72
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
CASES = {
    "llama_linear": ("Llama", {"rope_parameters": LINEAR, "attention_bias": True}),
    "llama_dynamic": ("Llama", {"rope_parameters": DYNAMIC}),
    "llama_gelu": ("Llama", {"hidden_act": "gelu", "mlp_bias": True}),
    "mistral_global": ("Mistral", {"sliding_window": None, "head_dim": 12}),
    "qwen2_window_unused": ("Qwen2", {"sliding_window": 8}),
    "qwen2_yarn": (
        "Qwen2",
        {
            "rope_parameters": YARN,
            "use_sliding_window": True,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3_biases": (
        "Qwen3",
        {"attention_bias": True, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "gemma2_uncapped": (
        "Gemma2",
        {
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "attention_bias": True,
            "num_key_value_heads": 4,
            "hidden_activation": "gelu",
        },
    ),
    "gemma3_untied": ("Gemma3", {"tie_word_embeddings": False, "sliding_window_pattern": 1}),
    "opt_plain": (
        "OPT",
        {
            "enable_bias": False,
            "layer_norm_elementwise_affine": False,
            "tie_word_embeddings": False,
            "activation_function": "gelu_new",
        },
    ),
    "opt_no_final_norm": ("OPT", {"_remove_final_layer_norm": True, "word_embed_proj_dim": 32}),
    "phi3_short": ("Phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 128}),
    "mixtral_gelu": ("Mixtral", {"hidden_act": "gelu", "sliding_window": 8}),
    "qwen2_moe_windows": (
        "Qwen2Moe",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2, "qkv_bias": False},
    ),
    "qwen3_moe_windows": (
        "Qwen3Moe",
        {"use_sliding_window": True, "sliding_window": 8, "decoder_sparse_step": 2, "attention_bias": True},
    ),
    "olmoe_unclipped": ("Olmoe", {"clip_qkv": None, "attention_bias": True, "norm_topk_prob": True}),
    "gpt_oss_global": ("GptOss", {"layer_types": ["full_attention"] * 3, "attention_bias": False}),
    "glm4_moe_plain": (
        "Glm4Moe",
        {"use_qk_norm": False, "attention_bias": False, "norm_topk_prob": False, "first_k_dense_replace": 2},
    ),
    "ernie4_5_moe_interval": ("Ernie4_5_Moe", {"moe_layer_interval": 2, "moe_num_shared_experts": 0}),
    "llama4_plain": (
        "Llama4",
        {
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
            "attention_bias": True,
            "num_experts_per_tok": 2,
            "no_rope_layers": [1, 0, 0, 1],
            "rope_parameters": LLAMA3,
        },
    ),
}


SELDOM = {"mixtral_gelu", "olmoe_unclipped", "qwen2_moe_windows", "glm4_moe_plain", "ernie4_5_moe_interval"}
assert SELDOM < CASES.keys()


@pytest.mark.parametrize("case", all_but(CASES.keys() - SELDOM, CASES))
def test_dense_forward_equals_transformers(tmp_path, case):
    family, changes = CASES[case]
    theirs = checkpoint(tmp_path, family, **changes)
    tokens = np.random.default_rng(0).integers(2, 160, LENGTH).tolist()
    want = logits(theirs, tokens)
    spec = read_config(tmp_path, jnp.float32)
    cfg = dataclasses.replace(spec.cfg, max_len=LENGTH)  # which longrope looks at
    graph, abstract = nnx.split(transformer.abstract(spec.module.Model, spec.cfg))
    model = nnx.merge(graph, load_params(open_checkpoint(tmp_path), spec, abstract, make_mesh(None)))
    model.cfg = cfg
    got = jax.jit(forward_fn(model))(nnx.state(model), jnp.asarray([tokens], jnp.int32))
    np.testing.assert_allclose(got[0], want, rtol=0, atol=1e-4 * np.abs(want).max())


def forward_fn(model):
    graph = nnx.graphdef(model)

    def forward(params, tokens):
        model = nnx.merge(graph, params)
        ctx = StepContext.of(tokens)
        return model.logits(model(tokens, ctx, [Dense()] * model.cfg.num_layers)[0], ctx)

    return forward


TINY = dict(vocab=32, embed=16, heads=4, kv_heads=2, head_dim=8, mlp=24, max_len=64)
ROPE = {"layers": (LayerSpec(rope=Rope(theta=1e4)),) * 3}
LONG = LongRope(
    theta=1e4, short_factors=(1.0,) * 3, long_factors=(2.0,) * 3, original_max_len=32, factor=2.0, fraction=0.75
)
LOCAL = {"layers": layers_of((4, None, 4), Rope(theta=1e4))}
PLAIN = {"layers": (LayerSpec(feed_forward=PlainMLP),) * 3}
EXPERTS = Experts(routing=Routing(experts=4, top_k=2), mlp=24, has_bias=True, activation=Activation(limit=1.0))
CONFIGS = {
    "llama": llama.Config(**TINY, **ROPE, qkv_bias=True, o_bias=True, mlp_bias=True),
    "mistral": mistral.Config(**TINY, layers=layers_of((4, 4, 4), Rope(theta=1e4))),
    "qwen2": qwen2.Config(**TINY, **LOCAL),
    "qwen3": qwen3.Config(**TINY, **LOCAL),
    "gemma2": gemma2.Config(**TINY, **LOCAL, attn_soft_cap=2.0, logit_soft_cap=4.0, query_scale=0.2),
    "gemma3": gemma3.Config(**TINY, layers=layers_of((4, None, 4), Rope(theta=1e6), Rope(theta=1e4))),
    "phi3": phi3.Config(**TINY, layers=layers_of((4, 4, 4), LONG)),
    "gpt_oss": gpt_oss.Config(**TINY, layers=(dataclasses.replace(LOCAL["layers"][0], feed_forward=EXPERTS),) * 3),
    "llama4": llama4.Config(
        **TINY,
        layers=tuple(
            LayerSpec(
                rope=rope, attention=llama4.PlacedAttention, feed_forward=dataclasses.replace(EXPERTS, shared_mlp=24)
            )
            for rope in (Rope(theta=1e4, interleaved=True), None)
        ),
    ),
    "opt": opt.Config(**(TINY | {"kv_heads": 4}), **PLAIN, word_embed=16),
    "opt_350m": opt.Config(**(TINY | {"kv_heads": 4}), **PLAIN, word_embed=12, post_norm=True, final_norm=False),
}


@pytest.mark.parametrize("family", CONFIGS)
def test_activations_keep_their_dtype_and_logits_are_float32(family):
    cfg = dataclasses.replace(CONFIGS[family], dtype=jnp.bfloat16)
    model = transformer.abstract(model_for(cfg), cfg)
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {jnp.dtype(jnp.bfloat16)}
    graph, params = nnx.split(model)

    def forward(params, tokens):
        model = nnx.merge(graph, params)
        pool = jnp.zeros(kv_shape(6, 4, cfg.kv_heads, cfg.head_dim, platform="cpu"), jnp.bfloat16)
        rows = jnp.zeros(2, jnp.int32)
        batch = PagedBatch(jnp.zeros((2, 3), jnp.int32), jnp.zeros(3, jnp.int32), rows, rows)
        ctx = StepContext.of(tokens)
        hidden, _ = model(tokens, ctx, [Paged(pool, batch)] * cfg.num_layers)
        return hidden, model.logits(hidden, ctx)

    hidden, out = jax.eval_shape(forward, params, jax.ShapeDtypeStruct((10,), jnp.int32))
    assert (hidden.dtype, hidden.shape) == (jnp.bfloat16, (10, 16))
    assert (out.dtype, out.shape) == (jnp.float32, (10, 32))


@pytest.mark.parametrize("family", ["gemma2", "opt_350m", "gpt_oss"])
def test_gradients_reach_every_parameter(family):
    cfg = dataclasses.replace(CONFIGS[family], layers=CONFIGS[family].layers[:2])
    model = model_for(cfg)(cfg, rngs=nnx.Rngs(params=0))
    forward = forward_fn(model)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 32, (2, 24)), jnp.int32)

    def loss(params):
        out = jax.nn.log_softmax(forward(params, tokens)[:, :-1])
        return -jnp.mean(jnp.take_along_axis(out, tokens[:, 1:, None], axis=-1))

    grads = jax.jit(jax.grad(loss))(nnx.state(model))
    for path, grad in jax.tree.leaves_with_path(grads):
        assert np.isfinite(grad).all() and np.abs(grad).max() > 0, jax.tree_util.keystr(path)


@pytest.mark.parametrize("mask", [{}, {"causal": False}], ids=["causal", "both_sides"])
def test_dense_soft_caps_and_windows_agree_with_a_plain_softmax(mask):
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(2, 9, heads, 4)).astype(np.float32) for heads in (4, 2, 2))
    capped, _ = Dense().attend(*map(jnp.asarray, (q, k, v)), scale=0.7, sliding_window=3, soft_cap=0.9, **mask)
    scores = np.einsum("bqhd,bshd->bhqs", q, np.repeat(k, 2, axis=2)) * 0.7
    age = np.arange(9)[:, None] - np.arange(9)
    weights = np.exp(0.9 * np.tanh(scores / 0.9)) * ((age >= (-2 if mask else 0)) & (age < 3))
    want = np.einsum("bhqs,bshd->bqhd", weights / weights.sum(-1, keepdims=True), np.repeat(v, 2, axis=2))
    np.testing.assert_allclose(capped, want, atol=1e-5)
    plain, _ = Dense().attend(*map(jnp.asarray, (q, k, v)), scale=0.7, sliding_window=3, **mask)
    loose, _ = Dense().attend(*map(jnp.asarray, (q, k, v)), scale=0.7, sliding_window=3, soft_cap=1e4, **mask)
    np.testing.assert_allclose(loose, plain, atol=1e-5)


def test_gemma_rounds_where_transformers_does():
    torch = pytest.importorskip("torch")
    from transformers.models.gemma2 import modeling_gemma2 as theirs

    rng = np.random.default_rng(0)
    x, weight = (rng.normal(size=shape).astype(np.float32) for shape in ((30, 48), 48))
    norm = RMSNorm(48, 1e-6, dtype=jnp.bfloat16, unit_offset=True)
    norm.scale.set_value(jnp.asarray(weight, jnp.bfloat16))
    want = theirs.Gemma2RMSNorm(48).to(torch.bfloat16)
    want.weight.data = torch.tensor(weight).to(torch.bfloat16)
    with torch.no_grad():
        y = want(torch.tensor(x).to(torch.bfloat16)).float().numpy()
    np.testing.assert_array_equal(norm(jnp.asarray(x, jnp.bfloat16)).astype(jnp.float32), y)

    cfg = dataclasses.replace(CONFIGS["gemma2"], embed=48, layers=(LayerSpec(),), dtype=jnp.bfloat16)
    model = gemma2.Model(cfg, rngs=nnx.Rngs(params=0))
    table = theirs.Gemma2TextScaledWordEmbedding(32, 48, 0, embed_scale=48**0.5).to(torch.bfloat16)
    table.weight.data = torch.tensor(np.asarray(model.embed.weight[...], np.float32)).to(torch.bfloat16)
    tokens = jnp.arange(32, dtype=jnp.int32)
    with torch.no_grad():
        y = table(torch.arange(32)).float().numpy()
    np.testing.assert_array_equal(model.embed_tokens(tokens, StepContext.of(tokens)).astype(jnp.float32), y)


def test_one_sine_and_cosine_for_each_rope_and_step():
    cfg = CONFIGS["gemma3"]
    graph, params = nnx.split(transformer.abstract(gemma3.Model, cfg))
    tokens = jax.ShapeDtypeStruct((1, 10), jnp.int32)
    text = str(jax.make_jaxpr(lambda p, t: nnx.merge(graph, p)(t, StepContext.of(t), [Dense()] * 3)[0])(params, tokens))
    assert text.count("= sin ") == text.count("= cos ") == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_heads": 3}, "heads=4 is not a multiple of kv_heads=3"),
        ({"layers": ()}, "layers is empty; give a LayerSpec for each layer"),
        ({"activation": "quick_gelu"}, "activation 'quick_gelu' is not supported; supported: .*'relu'"),
        ({"norm": "batch"}, "norm 'batch' is not supported"),
        ({"head_dim": 7}, "turn 7 features of head_dim=7"),
        ({"layers": (LayerSpec(rope=LONG),), "head_dim": 16}, "short_factor has 3 numbers, but 6 pairs"),
    ],
)
def test_values_that_do_not_go_together_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIGS["llama"], **changes)


def test_a_context_beyond_the_models_is_refused():
    model = opt.Model(CONFIGS["opt"], rngs=nnx.Rngs(params=0))
    with pytest.raises(ValueError, match="max_model_len=65 is more than the 64 tokens .* give at most 64"):
        LLM(model, max_model_len=65)
