"""A tiny random model, what it should say, and an engine of it that tests can share."""

from functools import cached_property, partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxllm import LLM, SamplingParams
from jaxllm.models import qwen3
from jaxllm.models.context import StepContext
from jaxllm.models.layers import LayerSpec, Rope
from jaxllm.models.state_cache import dense_caches as dense_caches

MAX_LEN = 96
TIE = 1e-4  # two logits closer than this share of the largest may come out in either order


class Tiny:
    """A model and its oracle: no cache, no batch, the whole sequence each time."""

    def __init__(self, seed: int = 0, *, kv_heads: int = 2, **sizes):
        fields = dict(
            vocab=96,
            embed=32,
            heads=4,
            head_dim=16,
            mlp=48,
            layers=(LayerSpec(rope=Rope(theta=1e4)),) * 2,
            max_len=MAX_LEN,
            qk_norm=True,
            dtype=jnp.float32,
        )
        self.cfg = qwen3.Config(kv_heads=kv_heads, **(fields | sizes))
        self.model = qwen3.Model(self.cfg, rngs=nnx.Rngs(params=seed))

    @cached_property
    def _forward(self):
        graph, params = nnx.split(self.model)

        @jax.jit
        def forward(params, tokens):
            model = nnx.merge(graph, params)
            ctx = StepContext.of(tokens)
            hidden, _ = model(tokens, ctx, dense_caches(model))
            return model.logits(hidden, ctx)[0]

        return lambda tokens: forward(params, tokens)

    def logits(self, ids) -> np.ndarray:
        """`[len(ids), vocab]`."""
        padded = jnp.zeros((1, MAX_LEN), jnp.int32).at[0, : len(ids)].set(jnp.asarray(ids, jnp.int32))
        return np.asarray(self._forward(padded))[: len(ids)]

    def assert_scored(self, items, scores, atol: float = 1e-5) -> None:
        """`scores` are those of `items`, (context, continuations) each."""
        for (context, continuations), of_one in zip(items, scores, strict=True):
            for tokens, score in zip(continuations, of_one, strict=True):
                logits = self.logits([*context, *tokens[:-1]])[len(context) - 1 :]
                wanted = np.asarray(jax.nn.log_softmax(logits))[np.arange(len(tokens)), tokens]
                assert score.token_ids == tokens and score.token_logprobs.dtype == np.float32
                np.testing.assert_allclose(score.token_logprobs, wanted, atol=atol)
                assert score.is_greedy == (logits.argmax(axis=-1) == tokens).all()

    def assert_greedy(self, prompt, output) -> None:
        """`output` is a greedy continuation of `prompt`, ties within `TIE` either way."""
        logits = self.logits([*prompt, *output])[len(prompt) - 1 : -1]
        chosen = logits[np.arange(len(output)), output]
        lost = logits.max(axis=-1) - chosen
        assert lost.max() <= TIE * np.abs(logits).max(), f"token {lost.argmax()} is not the best by {lost.max()}"


def prompts_of(lengths, vocab: int = 96, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab, n).tolist() for n in lengths]


def greedy(max_tokens: int, **fields) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **fields)


def ids(*prompts) -> list[dict]:
    return [{"prompt_token_ids": list(p)} for p in prompts]


def tokens(outputs) -> list[list[int]]:
    return [out.outputs[0].token_ids for out in outputs]


def make_llm(model, **options) -> LLM:
    """An engine of few and small executables."""
    sizes = dict(max_num_seqs=8, max_num_batched_tokens=24, block_size=4, num_blocks=64)
    return LLM(model, **(sizes | options))


def drain(llm: LLM) -> None:
    """Finishes the step that was dispatched before the host saw that a token was the last."""
    while llm.engine.has_work():
        assert llm.engine.step() == []


def clean(llm: LLM) -> None:
    """Asserts that an idle engine has everything back, and empties its prefix cache for the next test."""
    assert not llm.engine.has_work()
    llm.engine.scheduler.check()
    assert llm.stats().blocks_used == 0
    llm.engine.scheduler.pool.forget_keys()


class NoText:
    """A tokenizer for models that have none."""

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError

    def decode(self, token_ids, skip_special_tokens: bool = True) -> str:
        return ""


def logprobs_of(model, prompt) -> np.ndarray:
    """float32 [len(prompt) - 1]: of each token after the first, by the module itself."""
    logprobs = np.asarray(_logprobs(*nnx.split(model), jnp.asarray([prompt], jnp.int32)))
    return logprobs[np.arange(len(prompt) - 1), prompt[1:]]


@partial(jax.jit, static_argnums=0)
def _logprobs(graph, state, batch):
    model, ctx = nnx.merge(graph, state), StepContext.of(batch)
    hidden, _ = model(batch, ctx, dense_caches(model))
    return jax.nn.log_softmax(model.logits(hidden, ctx)[0])


def served_logprobs(llm: LLM, prompt) -> np.ndarray:
    """float32 [len(prompt) - 1]: those that the engine has."""
    (output,) = llm.generate(ids(prompt), SamplingParams(max_tokens=1, prompt_logprobs=0))
    found = [entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], prompt[1:], strict=True)]
    return np.array(found, np.float32)
