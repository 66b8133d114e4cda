"""What a request asked to see: log-probabilities of prompt and output, deltas, intervals, the stop string itself; and
that penalties, bias and masks hold through the engine, also after a preemption or a failure."""

import asyncio
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from jaxllm import AsyncLLM, RequestOutputKind, SamplingParams
from jaxllm.outputs import CompletionOutput, RequestOutput
from tests.engine.test_step_contract import Letters, fail_once
from tests.tiny import clean, greedy, ids, make_llm, prompts_of, tokens

PROMPT = prompts_of([30])[0]
VOCAB = 96


@pytest.fixture(scope="module")
def module_llm(tiny):
    with make_llm(tiny.model, tokenizer=Letters()) as llm:
        yield llm


@pytest.fixture
def text_llm(module_llm):
    yield module_llm
    while module_llm.engine.has_work():  # one token too many, after a stop string
        module_llm.engine.step()
    clean(module_llm)


def log_softmax(logits) -> np.ndarray:
    x = np.asarray(logits, np.float64)
    return x - x.max(-1, keepdims=True) - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True))


def assert_logprobs(found, exact, token, count) -> None:
    """`found` has the token, with its rank, and the `count` most likely ones."""
    assert next(iter(found)) == token and len(found) in (count, count + 1)
    for i, logprob in found.items():
        assert logprob.logprob == pytest.approx(exact[i], abs=1e-3)
        assert abs(np.sort(exact)[-logprob.rank] - exact[i]) < 1e-3
        assert logprob.decoded_token == Letters().decode([i])
    top = sorted((logprob.rank, i) for i, logprob in found.items())[:count]
    assert [rank for rank, _ in top] == list(range(1, count + 1))


@pytest.mark.parametrize("skips", [None, False, True])
def test_prompt_logprobs_are_complete_when_the_prompt_is_cached(text_llm, skips):
    params = SamplingParams(max_tokens=1, prompt_logprobs=1, skip_reading_prefix_cache=skips)
    text_llm.generate(ids(PROMPT), greedy(1))
    (out,) = text_llm.generate(ids(PROMPT), params)
    assert out.num_cached_tokens == 0 and len(out.prompt_logprobs) == len(PROMPT)


@pytest.mark.parametrize("chunk", [24, 7])
def test_logprobs_of_prompt_and_output(text_llm, tiny, monkeypatch, chunk):
    monkeypatch.setattr(text_llm.engine.runner, "max_tokens", lambda *needs: chunk)
    text_llm.generate(ids(PROMPT), greedy(1))  # the cached blocks must not hide the prompt's
    params = SamplingParams(temperature=0.9, seed=5, max_tokens=6, ignore_eos=True, logprobs=4, prompt_logprobs=2, n=2)
    (out,) = text_llm.generate(ids(PROMPT), params)
    assert out.num_cached_tokens == 0
    assert out.prompt_logprobs[0] is None and len(out.prompt_logprobs) == len(PROMPT)
    exact = log_softmax(tiny.logits(PROMPT))
    for i in range(1, len(PROMPT)):
        assert_logprobs(out.prompt_logprobs[i], exact[i - 1], PROMPT[i], 2)
    for completion in out.outputs:
        output = completion.token_ids
        exact = log_softmax(tiny.logits(PROMPT + output))[len(PROMPT) - 1 :]
        assert len(completion.logprobs) == len(output) == 6
        for i, token in enumerate(output):
            assert_logprobs(completion.logprobs[i], exact[i], token, 4)
        total = sum(exact[i, token] for i, token in enumerate(output))
        assert completion.cumulative_logprob == pytest.approx(total, abs=1e-2)


def test_those_who_do_not_ask_get_none_beside_those_who_do(text_llm):
    prompts = prompts_of([5, 9, 40])
    params = [greedy(5), greedy(5, logprobs=1), greedy(5, prompt_logprobs=0)]
    plain, some, scored = text_llm.generate(ids(*prompts), params)
    assert plain.outputs[0].logprobs is None and plain.prompt_logprobs is None
    assert plain.outputs[0].cumulative_logprob is None
    assert [len(found) for found in some.outputs[0].logprobs] == [1] * 5 and some.prompt_logprobs is None
    assert [list(found) for found in scored.prompt_logprobs[1:]] == [[token] for token in prompts[2][1:]]
    assert tokens([plain, some, scored]) == tokens(text_llm.generate(ids(*prompts), greedy(5)))


def test_chosen_tokens_are_scored_at_each_step(text_llm, tiny):
    (out,) = text_llm.generate(ids(PROMPT), greedy(4, logprob_token_ids=[3, 90, 7]))
    output = out.outputs[0].token_ids
    exact = log_softmax(tiny.logits(PROMPT + output))[len(PROMPT) - 1 :]
    for i, found in enumerate(out.outputs[0].logprobs):
        assert set(found) == {output[i], 3, 90, 7}
        assert [found[j].logprob for j in (3, 90, 7)] == pytest.approx(exact[i, [3, 90, 7]].tolist(), abs=1e-3)


def test_a_prompt_of_one_token(text_llm):
    (out,) = text_llm.generate(ids([7]), greedy(2, prompt_logprobs=3))
    assert out.prompt_logprobs == [None]


def test_prompt_logprobs_after_preemption_and_failure(text_llm, monkeypatch):
    prompts = prompts_of(range(9, 17))
    params = greedy(16, prompt_logprobs=1, logprobs=1)
    want = text_llm.generate(ids(*prompts), params)
    with preempting(text_llm):
        assert_same(text_llm.generate(ids(*prompts), params), want)
    for when in (1, 3, 6):
        fail_once(text_llm, when, monkeypatch)
        assert_same(text_llm.generate(ids(*prompts), params), want)
        monkeypatch.undo()


@contextmanager
def preempting(llm):
    """Leaves 20 blocks, for 8 requests that grow to 8 blocks each."""
    pool = llm.engine.scheduler.pool
    held = pool.allocate(pool.num_pages - 20)
    before = llm.stats().num_preemptions
    try:
        yield
    finally:
        pool.release(held)
    assert llm.stats().num_preemptions > before


def assert_same(got, want) -> None:
    """Equal tokens and, up to the rounding of another batch, log-probabilities."""
    for a, b in zip(got, want, strict=True):
        assert a.outputs[0].token_ids == b.outputs[0].token_ids
        for pair in ((a.outputs[0].logprobs, b.outputs[0].logprobs), (a.prompt_logprobs, b.prompt_logprobs)):
            values = [[next(iter(found.values())).logprob if found else 0.0 for found in side] for side in pair]
            np.testing.assert_allclose(*values, atol=1e-3)


def test_penalties_hold_through_preemption_and_failure(text_llm, tiny, monkeypatch):
    prompts = prompts_of(range(9, 17))
    params = greedy(16, frequency_penalty=2.0, presence_penalty=1.0, repetition_penalty=1.5)
    want = text_llm.generate(ids(*prompts), params)
    for prompt, output in zip(prompts, tokens(want), strict=True):
        assert_penalized(tiny, prompt, output, params)
    with preempting(text_llm):
        assert tokens(text_llm.generate(ids(*prompts), params)) == tokens(want)
    fail_once(text_llm, 9, monkeypatch)
    assert tokens(text_llm.generate(ids(*prompts), params)) == tokens(want)


def assert_penalized(tiny, prompt, output, params) -> None:
    logits = tiny.logits([*prompt, *output])[len(prompt) - 1 : -1].astype(np.float64)
    for i, token in enumerate(output):
        x, seen = logits[i], output[:i]
        for j in {*prompt, *seen}:
            x[j] = x[j] / params.repetition_penalty if x[j] > 0 else x[j] * params.repetition_penalty
        for j in set(seen):
            x[j] -= params.frequency_penalty * seen.count(j) + params.presence_penalty
        assert x[token] > x.max() - 1e-3


def test_bad_words_never_come(text_llm):
    (free,) = text_llm.generate(ids(PROMPT), greedy(20))
    text = free.outputs[0].text
    words = [text[3:5], text[7:10], text[0]]
    (out,) = text_llm.generate(ids(PROMPT), greedy(20, bad_words=words))
    assert len(out.outputs[0].text) == 20
    assert not [word for word in words if word in out.outputs[0].text]


def test_allowed_tokens_and_bias(text_llm):
    (out,) = text_llm.generate(ids(PROMPT), SamplingParams(max_tokens=30, allowed_token_ids=[4, 8, 15], seed=1))
    assert set(out.outputs[0].token_ids) == {4, 8, 15}
    (out,) = text_llm.generate(ids(PROMPT), greedy(5, logit_bias={50: 100.0}))
    assert out.outputs[0].token_ids == [50] * 5


def test_a_slot_forgets_who_had_it_before(text_llm):
    prompts = prompts_of([6] * 8)
    want = tokens(text_llm.generate(ids(*prompts), greedy(6)))
    text_llm.generate(ids(*prompts), greedy(6, logit_bias={50: 100.0}, bad_words=["a"], frequency_penalty=2.0))
    assert tokens(text_llm.generate(ids(*prompts), greedy(6, min_tokens=1))) == want


def test_a_request_left_without_tokens_ends_alone_with_an_error(text_llm):
    stuck = greedy(5, allowed_token_ids=[40], bad_words=["H"])
    good, bad = text_llm.generate(ids(PROMPT, PROMPT), [greedy(5, logprobs=1), stuck])
    assert good.outputs[0].finish_reason == "length" and good.error is None
    assert bad.outputs[0].finish_reason == "error" and "leave no token" in bad.error


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"logit_bias": {VOCAB: 1.0}}, r"logit_bias \[96\] are outside the vocabulary \[0, 95\]"),
        ({"allowed_token_ids": [1, 99]}, r"allowed_token_ids \[99\] are outside"),
        ({"logprob_token_ids": [96]}, r"logprob_token_ids \[96\] are outside"),
        ({"bad_words": ["far too long"]}, "'far too long' has 12 tokens; at most 8"),
    ],
)
def test_refused_at_the_door(text_llm, params, message):
    with pytest.raises(ValueError, match=message):
        text_llm.generate(ids([1]), SamplingParams(**params))


def test_bad_words_need_a_tokenizer(llm):
    with pytest.raises(ValueError, match="bad_words need a tokenizer"):
        llm.generate(ids([1]), SamplingParams(bad_words=["x"]))


@pytest.mark.parametrize("streamed", [False, True])
def test_the_stop_string_or_token_may_be_kept(text_llm, streamed):
    def last(params):
        if not streamed:
            return text_llm.generate(ids(PROMPT), params)[0].outputs[0]
        return [out for _, out in text_llm.stream(ids(PROMPT), params)][-1].outputs[0]

    text = last(greedy(20)).text
    stop = text[8:10]
    end = text.index(stop) + 2
    kept = last(greedy(20, stop=stop, include_stop_str_in_output=True))
    assert (kept.text, kept.stop_reason) == (text[:end], stop)
    token = Letters().encode(text)[6]
    kept = last(greedy(20, stop_token_ids=[token], include_stop_str_in_output=True))
    assert kept.text == text[: text.index(chr(token + 32)) + 1] and kept.stop_reason == token


@pytest.mark.parametrize("interval", [1, 4])
def test_deltas_join_to_the_whole(text_llm, interval):
    params = greedy(11, n=2, logprobs=1, stop="no such text", stream_interval=interval)
    (whole,) = text_llm.generate(ids(PROMPT), params)
    joined = {0: CompletionOutput(index=0), 1: CompletionOutput(index=1)}
    sizes = []
    for _, out in text_llm.stream(ids(PROMPT), replace(params, output_kind=RequestOutputKind.DELTA)):
        for new in out.outputs:
            old = joined[new.index]
            assert old.finish_reason is None, "an end is told once"
            logprobs = (old.logprobs or []) + new.logprobs
            sizes.append(len(new.token_ids))
            joined[new.index] = replace(
                new, text=old.text + new.text, token_ids=old.token_ids + new.token_ids, logprobs=logprobs
            )
    for ours, theirs in zip(joined.values(), whole.outputs, strict=True):
        # The second request finds its prompt cached: steps of other shapes, whose results differ in the last bits.
        assert ours.cumulative_logprob == pytest.approx(theirs.cumulative_logprob, abs=1e-4)
        for row, their_row in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert [(token, lp[1:]) for token, lp in row.items()] == [(t, lp[1:]) for t, lp in their_row.items()]
            assert {token: lp.logprob for token, lp in row.items()} == pytest.approx(
                {token: lp.logprob for token, lp in their_row.items()}, abs=1e-5
            )
        assert ours == replace(theirs, cumulative_logprob=ours.cumulative_logprob, logprobs=ours.logprobs)
    assert max(sizes) <= interval and sizes[0] == 1


def test_intervals_and_final_only(text_llm):
    def lengths(**params):
        return [len(out.outputs[0].token_ids) for _, out in text_llm.stream(ids(PROMPT), greedy(11, **params))]

    assert lengths() == list(range(1, 12))
    assert lengths(stream_interval=4) == [1, 5, 9, 11]
    assert lengths(output_kind=RequestOutputKind.FINAL_ONLY) == [11]
    (out,) = text_llm.generate(ids(PROMPT), greedy(11, output_kind=RequestOutputKind.DELTA, stream_interval=3))
    assert len(out.outputs[0].token_ids) == 11


def test_a_slow_reader_of_deltas_loses_none(tiny):
    async def main():
        llm = AsyncLLM(tiny.model, max_num_seqs=4, max_num_batched_tokens=8, block_size=4, num_blocks=64)
        params = greedy(30, output_kind=RequestOutputKind.DELTA)
        found, reads = [], 0
        async for out in llm.generate(ids(PROMPT)[0], params):
            found += out.outputs[0].token_ids
            reads += 1
            await asyncio.sleep(0.05)
        whole = [out async for out in llm.generate(ids(PROMPT)[0], greedy(30))][-1].outputs[0].token_ids
        await asyncio.to_thread(llm.close)
        return found, reads, whole

    found, reads, whole = asyncio.run(main())
    assert found == whole and reads < 30


def test_deltas_of_several_samples_merge_by_index():
    def delta(finished=False, **texts):
        outputs = [CompletionOutput(index=int(i[1:]), text=text, token_ids=[len(text)]) for i, text in texts.items()]
        return RequestOutput(request_id="r", prompt=None, prompt_token_ids=[1], outputs=outputs, finished=finished)

    merged = delta(_0="a", _1="bb").followed_by(delta(finished=True, _1="c", _2="d"))
    assert merged.finished
    found = [(c.index, c.text, c.token_ids) for c in merged.outputs]
    assert found == [(0, "a", [1]), (1, "bbc", [2, 1]), (2, "d", [1])]
