"""Trees of other code bases, made here of a known model, are that model again."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx, traverse_util

from jaxllm import models
from jaxllm.models import llama, qwen2, qwen3
from jaxllm.models.context import StepContext
from jaxllm.models.conversion_tables import TABLES, ForeignWeight
from jaxllm.models.registry import model_for
from jaxllm.models.rope import Rope
from jaxllm.models.transformer import layers_of
from tests.seldom import all_but
from tests.tiny import dense_caches, greedy, ids, make_llm, tokens

SIZES = dict(
    vocab=96,
    embed=32,
    heads=4,
    kv_heads=2,
    head_dim=16,
    mlp=48,
    max_len=64,
    layers=layers_of((None,) * 3, Rope(theta=1e4)),
)
LLAMA, QWEN2, QWEN3 = llama.Config(**SIZES), qwen2.Config(**SIZES), qwen3.Config(**SIZES)
TOKENS = jnp.asarray([np.random.default_rng(0).integers(0, 96, 20)], jnp.int32)


def model_of(cfg):
    """With scales and biases that are none of the constructor's ones and zeros."""
    model = model_for(cfg)(cfg, rngs=nnx.Rngs(0))
    state = nnx.state(model, nnx.Param)
    noise = iter(np.random.default_rng(1).standard_normal((1000, 64), np.float32))
    nnx.update(
        model, jax.tree.map(lambda x: x if x.size > 64 else x + 0.2 * next(noise)[: x.size].reshape(x.shape), state)
    )
    return model


def logits(cfg, params) -> np.ndarray:
    model = model_for(cfg)(cfg, rngs=nnx.Rngs(7))
    nnx.update(model, params)

    @nnx.jit
    def run(model):
        ctx = StepContext.of(TOKENS)
        return model.logits(model(TOKENS, ctx, dense_caches(model))[0], ctx)

    return np.asarray(run(model))


def plain(model) -> dict[str, np.ndarray]:
    """Of each layer the matrices apart, `[inputs, outputs]`; of heads with axes of their own."""
    cfg, found = model.cfg, {}
    found["embed"], found["norm"] = model.embed.weight[...], model.norm.scale[...]
    if not cfg.tie_embeddings:
        found["head"] = model.lm_head.weight[...]
    for i, layer in enumerate(model.layers):
        qkv, biases = layer.attn.qkv.weight[...], layer.attn.qkv.bias
        found[f"{i}.q"] = qkv[:, :, :-2].reshape(cfg.embed, cfg.heads, cfg.head_dim)
        found[f"{i}.k"], found[f"{i}.v"] = qkv[:, :, -2], qkv[:, :, -1]
        found[f"{i}.o"] = layer.attn.o.weight[...].reshape(cfg.heads, cfg.head_dim, cfg.embed)
        if biases is not None:
            bias = biases[...]
            found[f"{i}.q_bias"] = bias[:, :-2].reshape(-1)
            found[f"{i}.k_bias"], found[f"{i}.v_bias"] = bias[:, -2].reshape(-1), bias[:, -1].reshape(-1)
        found[f"{i}.gate"], found[f"{i}.up"] = layer.mlp.gate_up.weight[:, 0], layer.mlp.gate_up.weight[:, 1]
        found[f"{i}.down"] = layer.mlp.down.weight[...]
        found[f"{i}.attn_norm"], found[f"{i}.mlp_norm"] = layer.attn_norm.scale[...], layer.mlp_norm.scale[...]
        if layer.attn.q_norm is not None:
            found[f"{i}.q_norm"], found[f"{i}.k_norm"] = layer.attn.q_norm.scale[...], layer.attn.k_norm.scale[...]
    return {name: np.asarray(value) for name, value in found.items()}


def neighbours(heads: np.ndarray) -> np.ndarray:
    """The two halves of each head's features in turns."""
    first, second = np.split(heads, 2, axis=-1)
    return np.stack([first, second], axis=-1).reshape(heads.shape)


def hf_like(model, norm: str) -> dict:
    tree = {}
    for name, value in plain(model).items():
        i, _, part = name.rpartition(".")
        layer = f"model.layers.{i}"
        if part in "qkv":
            tree[f"{layer}.self_attn.{part}_proj.kernel"] = value.reshape(len(value), -1)
        elif part == "o":
            tree[f"{layer}.self_attn.o_proj.kernel"] = value.reshape(-1, value.shape[-1])
        elif part.endswith("_bias"):
            tree[f"{layer}.self_attn.{part[0]}_proj.bias"] = value
        elif part in ("gate", "up", "down"):
            tree[f"{layer}.mlp.{part}_proj.kernel"] = value
        elif part in ("q_norm", "k_norm"):
            tree[f"{layer}.self_attn.{part}.{norm}"] = value
        elif part.endswith("_norm"):
            names = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
            tree[f"{layer}.{names[part]}.{norm}"] = value
    ends = plain(model)
    tree |= {"model.embed_tokens.embedding": ends["embed"], f"model.norm.{norm}": ends["norm"]}
    return tree | ({"lm_head.kernel": ends["head"]} if "head" in ends else {})


def easylm(model) -> dict:
    names = {"q": "attention.wq", "k": "attention.wk", "v": "attention.wv", "o": "attention.wo"}
    names |= {"gate": "feed_forward.w1", "down": "feed_forward.w2", "up": "feed_forward.w3"}
    names |= {"attn_norm": "attention_norm", "mlp_norm": "ffn_norm"}
    tree = {}
    for name, value in plain(model).items():
        i, _, part = name.rpartition(".")
        if i:
            value = neighbours(value) if part in ("q", "k") else value
            value = value.reshape(len(value), -1) if part in ("q", "k", "v") else value
            value = value.reshape(-1, value.shape[-1]) if part == "o" else value
            tree[f"transformer.h.{i}.{names[part]}.kernel"] = value
    ends = plain(model)
    tree |= {"transformer.wte.embedding": ends["embed"], "transformer.ln_f.kernel": ends["norm"]}
    return tree | {"lm_head.kernel": ends["head"]}


def tunix(model) -> dict:
    names = {part: f"attn.{part}_proj.w" for part in "qkvo"} | {f"{part}_bias": f"attn.{part}_bias" for part in "qkv"}
    names |= {part: f"mlp.{part}_proj.kernel" for part in ("gate", "up", "down")}
    names |= {"q_norm": "attn.q_norm.w", "k_norm": "attn.k_norm.w"}
    names |= {"attn_norm": "input_layernorm.w", "mlp_norm": "post_attention_layernorm.w"}
    tree = {}
    for name, value in plain(model).items():
        i, _, part = name.rpartition(".")
        if i:
            tree[f"layers.{i}.{names[part]}"] = value
    ends = plain(model)
    tree |= {"embedder.input_embedding": ends["embed"], "final_norm.w": ends["norm"]}
    return tree | ({"lm_head.w": ends["head"]} if "head" in ends else {})


def maxtext(model, kind: str, *, scanned: bool) -> dict:
    """`kind`: "llama", "llama3.1" or "qwen3"."""
    names = {"q": "self_attention.query.kernel", "k": "self_attention.key.kernel", "v": "self_attention.value.kernel"}
    names |= {"o": "self_attention.out.kernel", "gate": "mlp.wi_0.kernel", "up": "mlp.wi_1.kernel"}
    names |= {"down": "mlp.wo.kernel", "q_norm": "self_attention.query_norm.scale"}
    names |= {"k_norm": "self_attention.key_norm.scale", "attn_norm": "pre_self_attention_layer_norm.scale"}
    names |= {"mlp_norm": "post_self_attention_layer_norm.scale"}
    found, tree = plain(model), {}
    for i in range(model.cfg.num_layers):
        for part, name in names.items():
            if f"{i}.{part}" in found:
                value = found[f"{i}.{part}"]
                value = neighbours(value) if kind == "llama3.1" and part in ("q", "k") else value
                value = value / np.sqrt(np.float32(model.cfg.head_dim)) if kind != "qwen3" and part == "q" else value
                tree[f"params.decoder.layers_{i}.{name}"] = value
    if scanned:
        same = {name: name.replace("layers_0", "layers") for name in tree if "layers_0" in name}
        each = range(model.cfg.num_layers)
        tree = {
            new: np.stack([tree[name.replace("layers_0", f"layers_{i}")] for i in each], axis=1)
            for name, new in same.items()
        }
    embed = np.concatenate([found["embed"], np.ones((32, model.cfg.embed), np.float32)])  # its vocabulary is padded
    tree |= {"params.token_embedder.embedding": embed, "params.decoder.decoder_norm.scale": found["norm"]}
    if "head" in found:
        tree["params.decoder.logits_dense.kernel"] = np.pad(found["head"], ((0, 0), (0, 32)))
    return tree


CASES = {
    **{
        f"maxtext-{kind}{'' if scanned else '-unscanned'}": (cfg, partial(maxtext, kind=kind, scanned=scanned))
        for kind, cfg in {"llama": LLAMA, "llama3.1": LLAMA, "qwen3": QWEN3}.items()
        for scanned in (True, False)
    },
    "easydel": (LLAMA, lambda model: hf_like(model, "kernel")),
    "easydel/biases": (QWEN2, lambda model: hf_like(model, "kernel")),
    "easylm": (LLAMA, easylm),
    "linen-llama": (LLAMA, lambda model: hf_like(model, "weight")),
    "tunix": (LLAMA, tunix),
    "tunix/biases": (QWEN2, tunix),
    "tunix/norms": (QWEN3, tunix),
    "tunix/tied": (qwen3.Config(**SIZES, tie_embeddings=True), tunix),
}


def nested(named: dict) -> dict:
    return traverse_util.unflatten_dict(named, sep=".")


def test_every_table_has_a_case():
    assert {name.partition("/")[0] for name in CASES} == TABLES.keys()


@pytest.mark.parametrize("case", all_but(("maxtext-llama", "easydel", "linen-llama", "tunix"), CASES))
def test_a_tree_is_the_model_that_it_was_made_of(case):
    (cfg, make), table = CASES[case], case.partition("/")[0]
    model = model_of(cfg)
    want = logits(cfg, nnx.state(model, nnx.Param))
    tree = jax.tree.map(jnp.asarray, nested(make(model)))
    params = jax.jit(lambda tree: models.convert(tree, table, cfg))(tree)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(params))
    np.testing.assert_allclose(logits(cfg, params), want, atol=1e-5 * np.abs(want).max())
    eager = models.convert(nested(make(model)), table, model)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), params, eager)


def test_variables_and_boxes_are_opened():
    model = model_of(LLAMA)
    want = models.convert(nested(hf_like(model, "weight")), "linen-llama", model)
    boxed = jax.tree.map(lambda leaf: linen.Partitioned(jnp.asarray(leaf), (None,)), nested(hf_like(model, "weight")))
    state = nnx.State(jax.tree.map(nnx.Param, nested(hf_like(model, "weight"))))
    for tree in ({"params": boxed}, state):
        jax.tree.map(np.testing.assert_array_equal, models.convert(tree, "linen-llama", model), want)


def test_the_engine_takes_them_without_leaving_the_device():
    first, second = model_of(QWEN3), model_for(QWEN3)(QWEN3, rngs=nnx.Rngs(3))
    tree = jax.tree.map(jnp.asarray, nested(maxtext(second, "qwen3", scanned=True)))
    convert = jax.jit(lambda tree: models.convert(tree, "maxtext-qwen3", QWEN3))
    with make_llm(first) as llm, make_llm(second) as other:
        with jax.transfer_guard_device_to_host("disallow"):
            llm.update_params(convert(tree))
        (got,), (want,) = (tokens(each.generate(ids([3, 1, 4]), greedy(6))) for each in (llm, other))
    assert got == want


def test_a_table_of_ones_own():
    model = model_of(LLAMA)
    table = {name.replace("model.", "backbone."): weight for name, weight in TABLES["easydel"].items()}
    tree = {name.replace("model.", "backbone."): value for name, value in hf_like(model, "kernel").items()}
    params = models.convert(nested(tree), table, model)
    jax.tree.map(np.testing.assert_array_equal, params, nnx.to_pure_dict(nnx.state(model, nnx.Param)))


def test_what_does_not_fit_is_named():
    model = model_of(LLAMA)
    tree = hf_like(model, "kernel")
    q = "model.layers.1.self_attn.q_proj.kernel"
    renamed = nested({name + "_a" * (name == q): value for name, value in tree.items()})
    with pytest.raises(ValueError, match=rf"missing {q}, unknown {q}_a; take"):
        models.convert(renamed, "easydel", model)
    with pytest.raises(ValueError, match=rf"{q} has shape \(32, 60\), but the model's .* implies \(32, 64\)"):
        models.convert(nested(tree | {q: tree[q][:, :60]}), "easydel", model)
    with pytest.raises(ValueError, match="missing model.layers.0.self_attn.k_proj.bias"):
        models.convert(nested(tree), "easydel", QWEN2)
    with pytest.raises(ValueError, match="table='easy' is unknown; choose one of .*'maxtext-llama'"):
        models.convert(nested(tree), "easy", model)
    partial = {"embed": ForeignWeight(path="embed.weight", axes="v d -> v d")}
    with pytest.raises(ValueError, match="the table fills 0 of the .* values of layers.0"):
        models.convert({"embed": tree["model.embed_tokens.embedding"]}, partial, model)
