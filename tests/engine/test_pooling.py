"""Prompts that are pooled, on the real engine, against the model applied to each whole prompt."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxllm import LLM, PoolingParams
from jaxllm.checkpoint.pooling_config import DenseLayer
from jaxllm.models.context import StepContext
from tests.pooler import pooler
from tests.tiny import Tiny, clean, dense_caches, drain, greedy, ids, make_llm, prompts_of

LENGTHS = (1, 2, 5, 24, 25, 61)


@pytest.fixture(scope="module")
def tiny():
    return Tiny()


@pytest.fixture(scope="module")
def shared(tiny):
    with make_llm(tiny.model) as llm:
        yield llm


@pytest.fixture
def llm(shared):
    yield shared
    drain(shared)
    clean(shared)


@pytest.fixture
def pools(llm):
    """Makes the engine pool in another way."""
    before = llm.engine.intake.pooler

    def change(**fields):
        llm.engine.intake.pooler = pooler(width=32, **fields)

    yield change
    llm.engine.intake.pooler = before


@nnx.jit
def forward(model, tokens):
    return model(tokens, StepContext.of(tokens), dense_caches(model))[0][0]


def hidden_states(model, prompt):
    return np.asarray(forward(model, jnp.asarray([prompt], jnp.int32)))


def expected(tiny, prompt, pooling, *, normalize=True):
    states = hidden_states(tiny.model, prompt)
    vector = {"last": states[-1], "mean": states.mean(0), "cls": states[0]}[pooling]
    return vector / np.linalg.norm(vector) if normalize else vector


def assert_pooled(tiny, prompts, outputs, pooling, **options):
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.error is None and output.finished and output.prompt_token_ids == prompt
        wanted = expected(tiny, prompt, pooling, **options)
        np.testing.assert_allclose(output.outputs.data, wanted, atol=2e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("pooling", ["last", "mean", "cls"])
def test_pools_what_the_model_makes_of_each_prompt_in_chunks_and_beside_text(tiny, llm, pools, pooling):
    """A step has 24 tokens: the longest prompt takes three."""
    pools(pooling=pooling)
    prompts = prompts_of(LENGTHS)
    alone = [llm.embed(ids(prompt), use_tqdm=False)[0] for prompt in prompts[-2:]]
    assert_pooled(tiny, prompts[-2:], alone, pooling)
    llm.reset_prefix_cache()
    texts = prompts_of((7, 30), seed=1)
    stream = llm.stream(ids(*texts), greedy(12))
    found = [next(stream)]
    outputs = llm.embed(ids(*prompts), use_tqdm=False)
    assert_pooled(tiny, prompts, outputs, pooling)
    for output in [*found, *stream]:
        tiny.assert_greedy(texts[output[0]], output[1].outputs[0].token_ids)


def test_the_last_token_of_a_cached_prefix_is_computed_and_other_ways_read_none(tiny, llm, pools):
    (prompt,) = prompts_of((40,))
    first, second = (llm.embed(ids(prompt), use_tqdm=False)[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 36)
    assert_pooled(tiny, [prompt, prompt], [first, second], "last")
    for pooling in ("mean", "cls"):
        pools(pooling=pooling)
        (output,) = llm.embed(ids(prompt), use_tqdm=False)
        assert output.num_cached_tokens == 0
        assert_pooled(tiny, [prompt], [output], pooling)
    (text,) = llm.generate(ids(prompt), greedy(4), use_tqdm=False)
    assert text.num_cached_tokens == 36, "pooled prompts leave their blocks to others"


def test_a_prompt_with_one_token_left_is_no_decode(tiny, llm):
    """It ends where a block does, so that a prefix hit leaves one token."""
    (prompt,) = prompts_of((41,))
    outputs = [llm.embed(ids(prompt), use_tqdm=False)[0] for _ in range(2)]
    assert outputs[1].num_cached_tokens == 40
    assert_pooled(tiny, [prompt] * 2, outputs, "last")


def test_few_blocks_preempt_and_nothing_changes(tiny):
    prompts = prompts_of([30, 33, 40, 29, 50] * 3)
    with make_llm(tiny.model, num_blocks=26, max_model_len=90) as llm:
        for pooling in ("last", "mean"):
            llm.engine.intake.pooler = pooler(pooling=pooling)
            texts = llm.stream(ids(*prompts[:4]), greedy(40))
            next(texts)
            assert_pooled(tiny, prompts, llm.embed(ids(*prompts), use_tqdm=False), pooling)
            for index, output in texts:
                tiny.assert_greedy(prompts[index], output.outputs[0].token_ids)
        assert llm.stats().num_preemptions
        drain(llm)
        clean(llm)


def test_an_abort_gives_everything_back(llm):
    requests = llm._pooling_requests(ids(*prompts_of([50] * 20)), None, "embed", 0)
    run = llm._run(requests, stream=False)
    next(run)
    run.close()


def test_what_is_not_finite_fails_alone(tiny):
    """One row of the embedding table is NaN: neighbours in the same steps know nothing of it."""
    model = Tiny().model
    table = model.embed.weight
    table[...] = table[...].at[7].set(jnp.nan)
    prompts = [[p if p != 7 else 8 for p in prompt] for prompt in prompts_of([9, 3, 30])]
    prompts.insert(1, [1, 7, 2])
    with make_llm(model) as llm:
        for pooling in ("last", "mean"):
            llm.engine.intake.pooler = pooler(pooling=pooling)
            outputs = llm.embed(ids(*prompts), use_tqdm=False)
            bad = outputs.pop(1)
            assert bad.outputs is None and "not finite" in bad.error
            assert_pooled(tiny, [prompts[0], *prompts[2:]], outputs, pooling)
        assert llm.stats().num_not_finite == 2


def test_dense_layers_then_a_cut_then_unit_length(tiny, llm, pools):
    rng = np.random.default_rng(0)
    bias = rng.normal(size=48).astype(np.float32)
    first = DenseLayer(rng.normal(size=(32, 48)).astype(np.float32), bias, "tanh")
    second = DenseLayer(rng.normal(size=(48, 16)).astype(np.float32), None, "identity")
    pools(pooling="mean", dense=(first, second), is_matryoshka=True)
    (prompt,) = prompts_of((9,))
    vector = expected(tiny, prompt, "mean", normalize=False)
    vector = np.tanh(vector @ first.weight + first.bias) @ second.weight
    for params, cut in ((PoolingParams(), 16), (PoolingParams(dimensions=5), 5)):
        (output,) = llm.embed(ids(prompt), pooling_params=params, use_tqdm=False)
        wanted = vector[:cut] / np.linalg.norm(vector[:cut])
        np.testing.assert_allclose(output.outputs.data, wanted, atol=1e-5)
        assert output.outputs.hidden_size == cut == len(output.outputs.embedding)
    (raw,) = llm.embed(ids(prompt), pooling_params=PoolingParams(use_activation=False), use_tqdm=False)
    np.testing.assert_allclose(raw.outputs.data, vector, rtol=1e-4, atol=1e-5)


def test_cut_prompts_and_salts(tiny, llm):
    (prompt,) = prompts_of((60,))
    (output,) = llm.embed(ids(prompt), pooling_params=PoolingParams(truncate_prompt_tokens=20), use_tqdm=False)
    assert_pooled(tiny, [prompt[-20:]], [output], "last")
    long = prompts_of((200,))[0]
    (output,) = llm.embed(ids(long), pooling_params=PoolingParams(truncate_prompt_tokens=-1), use_tqdm=False)
    most = llm.engine.config.max_model_len
    assert_pooled(tiny, [long[-most:]], [output], "last")
    for salt, cached in (("a", 0), ("a", 16), ("b", 0)):
        params = PoolingParams(truncate_prompt_tokens=20, cache_salt=salt)
        assert llm.embed(ids(prompt), pooling_params=params, use_tqdm=False)[0].num_cached_tokens == cached


def test_texts_are_lowercased_where_the_model_says_so(tiny, llm, pools):
    pools(lowercase=True)
    llm.engine.intake.tokenizer = Letters()
    try:
        outputs = llm.embed(["ABC", {"prompt": "aBc"}, "abc"], use_tqdm=False)
    finally:
        llm.engine.intake.tokenizer = None
    assert [output.prompt_token_ids for output in outputs] == [[1, 2, 3]] * 3


def test_scores_are_cosines(tiny, llm, pools):
    llm.engine.intake.tokenizer = Letters()
    try:
        outputs = llm.score("abc", ["abc", "xyz"], use_tqdm=False)
        several = llm.score(["abc", "q"], ["xyz", "q"], use_tqdm=False)
    finally:
        llm.engine.intake.tokenizer = None
    vectors = [expected(tiny, Letters().encode(text), "last") for text in ("abc", "xyz")]
    wanted = [1.0, float(vectors[0] @ vectors[1])]
    np.testing.assert_allclose([output.outputs.score for output in outputs], wanted, atol=1e-5)
    np.testing.assert_allclose([output.outputs.score for output in several], wanted[::-1], atol=1e-5)


class Letters:
    def encode(self, text, add_special_tokens=True):
        return [ord(letter) - 96 for letter in text]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.embed(ids([1]), pooling_params=PoolingParams(dimensions=4)), "hf_overrides"),
        (lambda llm: llm.embed(ids([])), "no tokens"),
        (lambda llm: llm.embed(ids([96])), "not an integer in"),
        (lambda llm: llm.embed(ids([1] * 97)), "97 tokens"),
        (lambda llm: llm.embed("a"), "needs a tokenizer"),
        (lambda llm: llm.classify(ids([1])), "take a model that was trained to classify"),
        (lambda llm: llm.encode(ids([1]), pooling_task="token_embed"), "must be one of embed, classify"),
        (lambda llm: llm.embed(ids([1]), pooling_params=PoolingParams(task="classify")), "leave it out"),
        (lambda llm: llm.embed(ids([1], [2]), pooling_params=[PoolingParams()]), "1 entries for 2"),
        (lambda llm: llm.score(["a", "b"], ["a", "b", "c"]), "give one and any number, or as many of each"),
        (lambda llm: llm.score([], "a"), "at least one string"),
        (lambda llm: PoolingParams(dimensions=0), "dimensions=0"),
        (lambda llm: PoolingParams(use_activation="yes"), "use_activation='yes'"),
        (lambda llm: PoolingParams(normalize=True), "its name is use_activation"),
        (lambda llm: PoolingParams(truncate_prompt_tokens=0), "truncate_prompt_tokens=0"),
        (lambda llm: PoolingParams(cache_salt=""), "cache_salt=''"),
    ],
)
def test_what_can_not_be_pooled(llm, call, message):
    with pytest.raises(ValueError, match=message):
        call(llm)


def test_a_prompt_may_fill_the_whole_context(tiny, llm):
    (prompt,) = prompts_of((96,))
    assert_pooled(tiny, [prompt], llm.embed(ids(prompt), use_tqdm=False), "last")


def test_a_model_that_classifies_has_no_samplers(tiny):
    model = Tiny(task="classify", labels=("a", "b", "c")).model
    with LLM(model, max_num_seqs=4, max_num_batched_tokens=24, block_size=4, num_blocks=64) as llm:
        kinds = {name[0] if isinstance(name, tuple) else name for name in llm.engine.runner.compile_plan.names}
        assert not kinds & {"sample", "logits", "alter", "sample_full", "rules", "prompt_logprobs"}
        prompts = prompts_of((3, 30, 50))
        logits = [hidden_states(model, prompt)[-1] @ np.asarray(model.score.weight[...]) for prompt in prompts]
        raw = llm.encode(ids(*prompts), PoolingParams(use_activation=False), use_tqdm=False)
        np.testing.assert_allclose([output.outputs.data for output in raw], logits, rtol=1e-4, atol=1e-4)
        classes = llm.classify(ids(*prompts), use_tqdm=False)
        for output, logit in zip(classes, logits, strict=True):
            wanted = np.exp(logit - logit.max()) / np.exp(logit - logit.max()).sum()
            np.testing.assert_allclose(output.outputs.probs, wanted, atol=1e-5)
            assert output.outputs.num_classes == 3
        for call, message in (
            (lambda: llm.generate(ids([1])), "generates no text"),
            (lambda: llm.embed(ids([1])), "it does 'classify'"),
            (lambda: llm.score("a", "b"), "knows 3 classes"),
        ):
            with pytest.raises(ValueError, match=message):
                call()
