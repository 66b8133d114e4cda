"""Log-probabilities of given tokens, on the real engine, against a forward pass over each whole text."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.default_model import DEFAULT_MODEL
from jaxllm.errors import EngineError
from jaxllm.text.continuations import encode_continuations, windows_of
from jaxllm.text.tokenizer import Tokenizer
from tests.engine.test_step_contract import fail_once
from tests.tiny import MAX_LEN, Tiny, clean, drain, greedy, ids, make_llm, prompts_of


def score(llm, *items):
    return llm.loglikelihood(list(items), use_tqdm=False)


def mixed(count: int, seed: int = 0, most: int = 60) -> list:
    """Contexts of many lengths, each with one to five continuations."""
    rng = np.random.default_rng(seed)

    def tokens(low, high):
        return rng.integers(0, 96, rng.integers(low, high)).tolist()

    return [(tokens(1, most), [tokens(1, 20) for _ in range(rng.integers(1, 6))]) for _ in range(count)]


def num_computed(llm, *items) -> int:
    """Tokens that scoring computes."""
    before = llm.stats().num_step_tokens
    score(llm, *items)
    return llm.stats().num_step_tokens - before


@pytest.mark.parametrize("lengths", [[1], [1, 1, 1], [3, 3, 3, 3], [2, 5, 1, 7], [30, 3]], ids=str)
@pytest.mark.parametrize("length", [1, 2, 5, 8, 24, 25, 60])
def test_log_probabilities_are_those_of_the_whole_text(llm, tiny, length, lengths):
    """Contexts that end in a block, fill one, and take several steps. Only the last token of the context is computed
    again for each continuation after the first."""
    item = prompts_of([length])[0], prompts_of(lengths, seed=1)
    before = llm.stats().num_step_tokens
    tiny.assert_scored([item], score(llm, item))
    assert llm.stats().num_step_tokens - before == length - 1 + sum(lengths)


def test_four_continuations_of_two_tokens_compute_their_context_once(llm):
    assert num_computed(llm, (prompts_of([48])[0], prompts_of([2] * 4, seed=1))) == 55


def test_a_context_that_the_prefix_cache_has_is_not_computed(llm, tiny):
    (context,) = prompts_of([49])  # blocks have 4 tokens: 48 are in full blocks, and the last one is computed
    assert num_computed(llm, (context, prompts_of([3, 3], seed=1))) == 48 + 6
    others = context, prompts_of([3, 3], seed=2)
    assert num_computed(llm, others) == 6
    tiny.assert_scored([others], score(llm, others))


def test_what_was_computed_of_a_continuation_is_never_taken_from_the_cache(llm, tiny):
    """The same text with its boundary further to the left has more log-probabilities."""
    (text,) = prompts_of([40])
    for at in (39, 30, 8, 1):
        item = text[:at], [text[at:]]
        tiny.assert_scored([item], score(llm, item))


def test_beside_text_with_few_blocks(tiny):
    """Sequences are preempted, contexts dropped and computed again."""
    with make_llm(tiny.model, num_blocks=24) as llm:
        check, step = llm.engine.scheduler.check, llm.engine.step
        llm.engine.step = lambda: (step(), check())[0]
        prompts, items = prompts_of([7, 30, 20], seed=1), mixed(40)
        stream = llm.stream(ids(*prompts), greedy(40))
        found = [next(stream)]
        tiny.assert_scored(items, score(llm, *items))
        for i, output in [*found, *stream]:
            tiny.assert_greedy(prompts[i], output.outputs[0].token_ids)
        assert llm.stats().num_preemptions
        llm.engine.step = step
        drain(llm)
        clean(llm)


@pytest.mark.parametrize("after", [True, False])
@pytest.mark.parametrize("when", [1, 2, 4])
def test_a_failed_step_is_computed_again(llm, tiny, monkeypatch, when, after):
    fail_once(llm, when, monkeypatch, after=after)
    items = mixed(4)
    tiny.assert_scored(items, score(llm, *items))


def test_a_step_does_not_look_at_all_that_wait(llm, monkeypatch):
    """Each context is looked up a few times in all, however many are behind it."""
    cache = llm.engine.scheduler.prefix_cache
    calls, find = [], cache.find
    monkeypatch.setattr(cache, "find", lambda *given: calls.append(1) or find(*given))
    items = mixed(300, most=8)
    score(llm, *items)
    assert len(calls) < 3 * len(items)


def test_as_long_as_the_model_reads_and_the_token_after(llm, tiny):
    (text,) = prompts_of([MAX_LEN + 1])
    for at in (1, 60, MAX_LEN):
        tiny.assert_scored([(text[:at], [text[at:]])], score(llm, (text[:at], [text[at:]])))
        with pytest.raises(ValueError, match="and the token after it"):
            score(llm, (text[:at], [[*text[at:], 1]]))


def test_a_greedy_generation_is_known_as_one(llm):
    (prompt,) = prompts_of([9])
    tokens = llm.generate(ids(prompt), greedy(8))[0].outputs[0].token_ids
    drain(llm)
    other = [*tokens[:-1], (tokens[-1] + 1) % 96]
    (scores,) = score(llm, (prompt, [tokens, other]))
    assert [each.is_greedy for each in scores] == [True, False]
    assert scores[0].logprob == pytest.approx(scores[0].token_logprobs.sum(), abs=1e-5)
    assert scores[0].logprob > scores[1].logprob


def test_arrays_are_ids_too(llm, tiny):
    item = prompts_of([9])[0], prompts_of([3, 2], seed=1)
    given = np.asarray(item[0]), [np.asarray(each, np.int32) for each in item[1]]
    tiny.assert_scored([item], llm.score([given], use_tqdm=False))
    assert llm.loglikelihood([]) == []


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([([1], [[2]]), ([], [[1]])], r"contexts\[1\]: the prompt has no tokens"),
        ([([1], [])], r"contexts\[0\]: there are no continuations"),
        ([([1], [[2], []])], "a continuation has no tokens"),
        ([([1], [[96]])], "continuation token id 96 is not an integer in"),
        ([([1], [[2.5]])], "continuation token id 2.5"),
        ([([96], [[1]])], "prompt token id 96"),
        ([([1], [3])], "continuation=3 must be a list"),
        ([([1], "text")], "continuations is a str"),
        ([([1], ["text"])], "give all as either"),
        ([("text", [[1]])], "a continuation is a list; give a string too"),
        ([("text", [" and more"])], "texts need a tokenizer"),
        ([[1, 2, 3]], r"contexts\[0\] is no pair"),
        (([1], [[2]]), "must be a list of pairs"),
        ("text", "must be a list of pairs"),
    ],
)
def test_what_is_wrong_is_told_before_anything_runs(llm, items, message):
    before = llm.stats().num_step_tokens
    with pytest.raises(ValueError, match=message):
        llm.score(items)
    assert llm.stats().num_step_tokens == before and not llm.engine.has_work()


def test_a_model_that_embeds_scores_nothing(llm, monkeypatch):
    monkeypatch.setattr(llm.engine.intake, "config", replace(llm.engine.config, generates=False))
    with pytest.raises(ValueError, match="generates no text"):
        llm.score([([1], [[2]])])


def test_what_is_not_finite_is_an_error():
    model = Tiny().model
    model.embed.weight[...] = model.embed.weight[...].at[7].set(np.nan)
    with make_llm(model) as llm:
        with pytest.raises(EngineError, match="not finite"):
            score(llm, ([1, 2], [[3]]), ([1, 7], [[3, 4]]))
        clean(llm)


def log_probabilities(tiny, document, prefix, max_len, stride):
    """Token by token, each of the text that its window reads before it."""
    tokens, found = [prefix, *document], []
    for i in range(len(document)):
        window = 0 if i < max_len else 1 + (i - max_len) // stride
        end = min(max_len + window * stride, len(document))
        logits = tiny.logits(tokens[max(0, end - max_len) : i + 1])[-1]
        found.append(float(jax.nn.log_softmax(logits)[document[i]]))
    return np.asarray(found)


@pytest.mark.parametrize(("max_len", "stride"), [(None, None), (16, None), (16, 16), (16, 5), (16, 1), (1, 1)])
@pytest.mark.parametrize("length", [1, 16, 17, 50])
def test_a_document_in_strides(llm, tiny, length, max_len, stride):
    (document,) = prompts_of([length])
    (found,) = llm.perplexity(document, stride=stride, max_len=max_len, prefix_token_id=3, use_tqdm=False)
    wanted = log_probabilities(tiny, document, 3, max_len or MAX_LEN, stride or max_len or MAX_LEN)
    np.testing.assert_allclose(found.token_logprobs, wanted, atol=1e-5)
    assert found.token_ids == document and found.token_logprobs.dtype == np.float32
    assert found.logprob == pytest.approx(wanted.sum(), abs=1e-4)
    assert found.perplexity == pytest.approx(np.exp(-wanted.mean()), rel=1e-5)


def test_documents_come_back_in_their_order(llm):
    documents = prompts_of([200, 3, 97])
    found = llm.perplexity(documents, prefix_token_id=0, stride=50, use_tqdm=False)
    assert [each.token_ids for each in found] == documents
    assert llm.perplexity([], use_tqdm=False) == []


@pytest.mark.parametrize("make", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_token_ids_as_arrays(llm, make):
    documents = prompts_of([6, 6])
    found = llm.perplexity(documents, prefix_token_id=0, use_tqdm=False)
    for given in (make(documents), [make(each) for each in documents]):
        again = llm.perplexity(given, prefix_token_id=0, use_tqdm=False)
        assert [each.token_ids for each in again] == documents
        np.testing.assert_array_equal(again[0].token_logprobs, found[0].token_logprobs)
    (alone,) = llm.perplexity(make(documents[0]), prefix_token_id=0, use_tqdm=False)
    assert alone.token_ids == documents[0]
    ((*scores,),) = score(llm, (make(documents[0]), make(documents)))
    assert [each.token_ids for each in scores] == documents


@pytest.mark.parametrize(
    ("document", "options", "message"),
    [
        ([1], {}, "give prefix_token_id"),
        ([1], {"prefix_token_id": 96}, "prompt token id 96"),
        ([1], {"prefix_token_id": 0, "max_len": MAX_LEN + 1}, r"max_len=97 must be an integer in \[1, 96\]"),
        ([1], {"prefix_token_id": 0, "max_len": 8, "stride": 9}, r"stride=9 must be an integer in \[1, 8\]"),
        ([[1], []], {"prefix_token_id": 0}, "document 1 has no tokens"),
        ("text", {"prefix_token_id": 0}, "texts need a tokenizer"),
        (7, {"prefix_token_id": 0}, "documents must be"),
    ],
)
def test_documents_that_cant_be_scored(llm, document, options, message):
    with pytest.raises(ValueError, match=message):
        llm.perplexity(document, **options)


def test_windows_read_as_much_as_they_may():
    """The example in lm-evaluation-harness's documentation."""
    windows = [(each.context + each.token_ids[:-1], each.token_ids) for each in windows_of([*range(10)], -1, 4, 4)]
    assert windows == [([-1, 0, 1, 2], [0, 1, 2, 3]), ([3, 4, 5, 6], [4, 5, 6, 7]), ([5, 6, 7, 8], [8, 9])]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_dir(DEFAULT_MODEL)


class TestTexts:
    def test_are_tokenised_together_and_split_by_the_context(self, tokenizer):
        context, (first, second) = encode_continuations("def f(x):\n", ["    return", "pass"], tokenizer)
        assert context == tokenizer.encode("def f(x):")
        assert first == tokenizer.encode("def f(x):\n    return")[len(context) :]
        assert second == tokenizer.encode("def f(x):\npass")[len(context) :]

    def test_spaces_at_the_end_of_the_context_are_the_continuations(self, tokenizer):
        spaced = encode_continuations("return ", ["self"], tokenizer)
        assert spaced == encode_continuations("return", [" self"], tokenizer)

    def test_nothing_before_them_is_the_beginning_of_a_text(self, tokenizer):
        context, (ids,) = encode_continuations("", ["def f"], tokenizer)
        assert context == [tokenizer.bos_token_id] and ids == tokenizer.encode("def f", add_special_tokens=False)
        assert encode_continuations("", [tokenizer.bos_token + "def f"], tokenizer) == (context, [ids])

    def test_a_tokenizer_without_such_a_token(self):
        bare = Tokenizer.from_dir(DEFAULT_MODEL)
        bare.chat.special_tokens.clear()
        bare.eos_token_id = None
        with pytest.raises(ValueError, match="names no token that begins or ends a text"):
            encode_continuations("", ["x"], bare)
