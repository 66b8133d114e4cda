"""Families with biases, learned positions, soft caps and windows say the same on two devices as on one."""

from functools import partial

import jax
import numpy as np
import pytest
from flax import nnx

from jaxllm.models import gemma2, opt
from jaxllm.models.layers import LayerSpec, PlainMLP, Rope
from jaxllm.models.transformer import layers_of
from tests.tiny import MAX_LEN, Tiny, clean, greedy, ids, make_llm, prompts_of, tokens

SIZES = dict(vocab=96, embed=32, heads=4, head_dim=8, mlp=48, max_len=MAX_LEN)
PROMPTS = prompts_of([1, 5, 16, 33, 7])


class Family(Tiny):
    """A tiny model whose biases and norms are not what they begin with."""

    def __init__(self, model_cls, cfg):
        self.cfg = cfg
        self.model = model_cls(cfg, rngs=nnx.Rngs(params=0))
        noise = np.random.default_rng(0)
        for var in jax.tree.leaves(nnx.state(self.model), is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)):
            value = var.get_value()
            if np.ptp(value) == 0:
                var.set_value(value + noise.normal(0, 0.3, value.shape).astype(value.dtype))


MODELS = {
    "opt": partial(
        Family,
        opt.Model,
        opt.Config(**SIZES, layers=(LayerSpec(feed_forward=PlainMLP),) * 2, kv_heads=4, word_embed=32),
    ),
    "gemma2": partial(
        Family,
        gemma2.Model,
        gemma2.Config(
            **SIZES, layers=layers_of((8, None), Rope(theta=1e4)), kv_heads=2, attn_soft_cap=1.0, logit_soft_cap=5.0
        ),
    ),
}


@pytest.mark.parametrize("family", MODELS)
def test_the_same_tokens_on_two_devices(family):
    tiny = MODELS[family]()
    with make_llm(tiny.model, mesh="tensor=2", max_num_seqs=4, max_num_batched_tokens=8) as llm:
        for prompt, output in zip(PROMPTS, tokens(llm.generate(ids(*PROMPTS), greedy(12))), strict=True):
            tiny.assert_greedy(prompt, output)
        params = llm.engine.runner.executor.abstract_params
        layer = params["layers"][0]
        leaves = {"qkv": layer["attn"]["qkv"]["weight"], "embed": params["embed"]["weight"]}
        shapes = {name: shard_shape(leaf) for name, leaf in leaves.items()}
        kv_heads = tiny.cfg.kv_heads
        assert shapes == {"qkv": (32, kv_heads // 2, 4 // kv_heads + 2, 8), "embed": (48, 32)}
        if family == "opt":
            attn, mlp = layer["attn"], layer["mlp"]
            biases = [part["bias"] for part in (attn["qkv"], attn["o"], mlp["up"], mlp["down"])]
            assert [*map(shard_shape, [*biases, params["positions"]["weight"]])] == [
                (2, 3, 8),
                (32,),
                (24,),
                (32,),
                (MAX_LEN + 2, 32),
            ]
        clean(llm)


def shard_shape(variable):
    leaf = variable.get_value()
    return leaf.sharding.shard_shape(leaf.shape)
