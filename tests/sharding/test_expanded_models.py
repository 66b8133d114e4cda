"""More devices than KV heads, and vocabularies that they do not divide: the same tokens as on one device."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxllm import LLM, SamplingParams
from jaxllm.errors import MeshError
from jaxllm.models import gemma2, opt, qwen2, qwen3
from jaxllm.models.layers import LayerSpec, PlainMLP, Rope
from jaxllm.models.transformer import layers_of
from tests.models.test_sharded_families import Family
from tests.plain_search import assert_found, beam_search, draw, log_softmax
from tests.seldom import all_but
from tests.tiny import MAX_LEN, Tiny, clean, drain, greedy, ids, make_llm, prompts_of, tokens

SIZES = dict(embed=32, head_dim=8, mlp=48, max_len=MAX_LEN)
LAYERS = (LayerSpec(rope=Rope(theta=1e4)),) * 2
PROMPTS = prompts_of([1, 5, 16])
FEW = dict(max_num_seqs=2, max_num_batched_tokens=4, block_size=4, num_blocks=64)


def qwen2_like():
    """Biases, and 7 queries for 4 devices."""
    cfg = qwen2.Config(**SIZES, vocab=97, heads=14, kv_heads=2, layers=LAYERS, qkv_bias=True)
    return Family(qwen2.Model, cfg)


def gemma2_like():
    layers = layers_of((8, None), Rope(theta=1e4))
    caps = dict(attn_soft_cap=1.0, logit_soft_cap=5.0)
    return Family(gemma2.Model, gemma2.Config(**SIZES, vocab=98, heads=8, kv_heads=4, layers=layers, **caps))


def opt_like():
    layers = (LayerSpec(feed_forward=PlainMLP),) * 2
    return Family(opt.Model, opt.Config(**SIZES, vocab=97, heads=4, kv_heads=4, word_embed=16, layers=layers))


# On so many devices: KV heads of the pool, columns of the logits.
MODELS = {
    "one head": (lambda: Tiny(kv_heads=1, vocab=97), 2, 2, 98),
    "one head, more devices": (lambda: Tiny(kv_heads=1, heads=8, vocab=96), 8, 8, 96),
    "biases, uneven groups": (qwen2_like, 8, 8, 104),
    "tied, soft caps, windows": (gemma2_like, 8, 8, 104),
    "no groups": (opt_like, 4, 4, 100),
}


@pytest.mark.parametrize("name", all_but(("biases, uneven groups", "tied, soft caps, windows"), MODELS))
def test_greedy_tokens_of_every_family(name):
    make, count, kv_heads, width = MODELS[name]
    tiny = make()
    with LLM(tiny.model, mesh=f"tensor={count}", **FEW) as llm:
        for prompt, output in zip(PROMPTS, tokens(llm.generate(ids(*PROMPTS), greedy(8))), strict=True):
            tiny.assert_greedy(prompt, output)
        executor = llm.engine.runner.executor
        assert {pool.shape[2] for pool in executor.state.kv_pools} == {kv_heads}
        assert {pool.sharding.shard_shape(pool.shape)[2] for pool in executor.state.kv_pools} == {kv_heads // count}
        for params in (llm.params, nnx.state(tiny.model, nnx.Param)):
            for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(nnx.state(tiny.model, nnx.Param)), strict=True):
                np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
        table = executor.abstract_params["embed"]["weight"].get_value()
        assert table.shape[0] == width and table.sharding.shard_shape(table.shape)[0] == width // count
        drain(llm)
        clean(llm)


class Sunk(qwen3.Model):
    """A token's logit is always far below zero, which what pads them would have."""

    def __init__(self, cfg, *, rngs):
        super().__init__(cfg, rngs=rngs)
        self.depth = nnx.Param(jnp.full((cfg.vocab,), -40.0), axes=("vocab",))

    def logits(self, hidden, ctx):
        logits = super().logits(hidden, ctx)
        return logits + jnp.broadcast_to(self.depth[...], logits.shape)


@pytest.mark.parametrize(
    ("vocab", "tied", "mesh"), [(259, True, "tensor=4"), pytest.param(97, False, "tensor=8", marks=pytest.mark.slow)]
)
def test_everything_that_samples_knows_the_vocabulary_alone(vocab, tied, mesh):
    tiny = Tiny(kv_heads=2, heads=8, vocab=vocab, tie_embeddings=tied)
    tiny.model = Sunk(tiny.cfg, rngs=nnx.Rngs(params=0))
    prompts = prompts_of([3, 9, 14], vocab)
    last = vocab - 1
    sizes = dict(max_num_seqs=2, max_num_batched_tokens=4, num_blocks=16, preemption="swap")
    with make_llm(tiny.model, mesh=mesh, **sizes) as llm:
        for prompt, output in zip(prompts, tokens(llm.generate(ids(*prompts), greedy(6))), strict=True):
            tiny.assert_greedy(prompt, output)
        (out,) = llm.generate(ids(prompts[1]), SamplingParams(n=2, seed=7, max_tokens=8, top_k=vocab + 1, min_p=1e-30))
        assert [one.token_ids for one in out.outputs] == [draw(tiny, prompts[1], 7, i, 8) for i in range(2)]
        hot = SamplingParams(temperature=2.0, seed=1, max_tokens=20, ignore_eos=True, logprobs=20, prompt_logprobs=20)
        (out,) = llm.generate(ids(prompts[2]), hot)
        own = out.outputs[0]
        assert max(own.token_ids) < vocab
        rows = log_softmax(tiny.logits([*prompts[2], *own.token_ids]))
        found = [*out.prompt_logprobs[1:], *own.logprobs]
        for row, entry in zip(rows, found, strict=False):
            assert len(entry) in (20, 21) and max(entry) < vocab
            for token, one in entry.items():
                assert one.logprob == pytest.approx(row[token], abs=2e-3)
        only = SamplingParams(temperature=2.0, seed=2, max_tokens=4, allowed_token_ids=[last], repetition_penalty=1.3)
        biased = greedy(4, logit_bias={last: 100.0}, presence_penalty=0.1, frequency_penalty=0.1)
        assert tokens(llm.generate(ids(prompts[0], prompts[1]), [only, biased])) == [[last] * 4] * 2
        params = SamplingParams(n=2, beam_width=2, max_tokens=5, temperature=0.0, ignore_eos=True)
        (out,) = llm.generate(ids(prompts[1]), params)
        assert_found(out.outputs, beam_search(tiny, prompts[1], params), params)
        long = prompts_of([24, 20], vocab)
        for prompt, output in zip(long, tokens(llm.generate(ids(*long), greedy(14))), strict=True):  # 19 blocks
            tiny.assert_greedy(prompt, output)
        assert llm.stats().num_swapped > 0
        for bad in (dict(allowed_token_ids=[vocab]), dict(logit_bias={vocab: 1.0})):
            with pytest.raises(ValueError, match=rf"outside the vocabulary \[0, {last}\]"):
                llm.generate(ids(prompts[0]), SamplingParams(**bad))
        with pytest.raises(ValueError, match=rf"prompt token id {vocab} is not an integer in \[0, {last}\]"):
            llm.generate(ids([vocab]), greedy(1))
        drain(llm)
        clean(llm)


def test_parameters_are_updated_and_returned_as_the_model_has_them():
    tiny, other = (Tiny(seed, kv_heads=2, vocab=97) for seed in (0, 1))
    mine = nnx.state(other.model, nnx.Param)

    def check(llm, model):
        for prompt, output in zip(PROMPTS, tokens(llm.generate(ids(*PROMPTS), greedy(4))), strict=True):
            model.assert_greedy(prompt, output)

    with LLM((tiny.cfg, nnx.to_pure_dict(nnx.state(tiny.model, nnx.Param))), mesh="tensor=4", **FEW) as llm:
        check(llm, tiny)
        first = llm.params
        llm.update_params(mine)
        check(llm, other)
        on_mesh = llm.params
        assert jax.tree.structure(on_mesh) == jax.tree.structure(mine)
        assert all(len(leaf.sharding.device_set) == 4 for leaf in jax.tree.leaves(on_mesh))
        for a, b in zip(jax.tree.leaves(on_mesh), jax.tree.leaves(mine), strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
        llm.update_params(first)
        check(llm, tiny)
        llm.update_params(on_mesh)
        check(llm, other)
        norms = [leaf for leaf in jax.tree.leaves(on_mesh) if leaf.ndim == 1]
        assert norms and all(any(norm is leaf for leaf in llm.engine.runner.executor.leaves) for norm in norms)
        llm.update_params(jax.tree.map(lambda x: x * 1, on_mesh))  # what a training step on the mesh makes
        check(llm, other)


def test_a_directory_says_the_same_on_more_devices_than_it_has_heads():
    prompts = ["The sea", "One, two, three"]  # 2 KV heads, and 4096 tokens
    results = []
    for mesh in (None, "tensor=4"):
        with LLM(mesh=mesh, max_model_len=64, **FEW | {"block_size": 8}) as llm:
            results.append(tokens(llm.generate(prompts, greedy(12))))
    assert results[0] == results[1]


class OwnBias(qwen3.Model):
    """A parameter over the vocabulary that does not say so, unless `axes` do."""

    axes = None

    def __init__(self, cfg, *, rngs):
        super().__init__(cfg, rngs=rngs)
        options = {} if self.axes is None else {"axes": self.axes}
        self.own = nnx.Param(jax.random.normal(rngs.params(), (cfg.vocab,)), **options)

    def logits(self, hidden, ctx):
        logits = super().logits(hidden, ctx)
        return logits + jnp.broadcast_to(self.own[...], logits.shape)


class NamedBias(OwnBias):
    axes = ("vocab",)


class WholeHead(qwen3.Model):
    """Its head is not split, and so makes as many logits as there are tokens."""

    def __init__(self, cfg, *, rngs):
        super().__init__(cfg, rngs=rngs)
        self.lm_head.weight.set_metadata(axes=("embed", None))


def test_a_module_of_somebody_elses_is_split_or_refused_with_the_reason():
    cfg = dataclasses.replace(Tiny().cfg, vocab=97)
    with pytest.raises(MeshError, match=r"OwnBias can't be served on a mesh of \{'tensor': 2\}, where .* 97 is padded"):
        LLM(OwnBias(cfg, rngs=nnx.Rngs(params=0)), mesh="tensor=2")
    for module in (NamedBias, WholeHead):
        tiny = Tiny(vocab=97)
        tiny.model = module(cfg, rngs=nnx.Rngs(params=3))
        with LLM(tiny.model, mesh="tensor=2", **FEW) as llm:
            for prompt, output in zip(PROMPTS, tokens(llm.generate(ids(*PROMPTS), greedy(4))), strict=True):
                tiny.assert_greedy(prompt, output)
