"""Beam search in the engine, against the plain one: what it finds, its text and log-probabilities, its streams."""

import asyncio

import numpy as np
import pytest

from jaxllm import AsyncLLM, SamplingParams
from jaxllm.engine import build
from jaxllm.sampling_params import RequestOutputKind
from jaxllm.text.foreign_tokenizer import wrap
from tests.engine.test_step_contract import Letters
from tests.plain_search import assert_found, beam_search, cumulative_logprob, log_softmax
from tests.tiny import drain, greedy, ids, prompts_of

PROMPTS = prompts_of([1, 4, 7, 30], seed=1)  # alone in a block, a block, inside of one, more than a step takes
OFTEN = list(range(0, 96, 5))[:16]  # as stop tokens: some beam ends in nearly every step


def beams(width: int, max_tokens: int, **fields) -> SamplingParams:
    return SamplingParams(beam_width=width, max_tokens=max_tokens, **({"n": width} | fields))


def seen(out) -> list[tuple]:
    """What an output says, log-probabilities roughly."""
    return [
        (c.index, c.token_ids, c.text, c.finish_reason, c.stop_reason, round(c.cumulative_logprob, 3))
        for c in out.outputs
    ]


@pytest.fixture
def letters(llm, monkeypatch):
    """The shared engine with a tokenizer, of single characters."""
    monkeypatch.setattr(llm.engine.intake, "tokenizer", wrap(Letters()))
    return llm


def text_of(tokens) -> str:
    return Letters().decode(tokens)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 2, "length_penalty": 0.0, "early_stopping": True, "stop_token_ids": OFTEN},
        {"length_penalty": 2.0, "early_stopping": "never", "stop_token_ids": OFTEN},
        {"length_penalty": -1.0, "stop_token_ids": OFTEN[:2], "min_tokens": 4},
        {"stop_token_ids": OFTEN, "min_tokens": 10},
        {"logit_bias": {3: 2.0, 40: 5.0, 87: -100.0}},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.3, "stop_token_ids": OFTEN},
        {"repetition_penalty": 0.7, "logit_bias": {20: 9.0}},
        {"allowed_token_ids": list(range(1, 96, 4)), "stop_token_ids": [5, 9]},
        {"allowed_token_ids": [7, 8, 9]},  # fewer than beams
        {"allowed_token_ids": [7]},
        {"bad_words": ["W", "vw", "j0"]},
        {"stop": ["a", "E*", "W"], "stop_token_ids": OFTEN[:4]},
        {"stop": ["a", "b", "W"], "min_tokens": 5},
    ],
    ids=lambda fields: "-".join(fields) or "nothing",
)
def test_equals_the_plain_search(letters, tiny, fields):
    params = beams(4, 10, **fields)
    words = [[ord(c) - 32 for c in word] for word in params.bad_words]
    words += [[0, *word] for word in words]  # after a space
    outs = letters.generate(ids(*PROMPTS), params)
    for prompt, out in zip(PROMPTS, outs, strict=True):
        assert out.error is None
        assert_found(out.outputs, beam_search(tiny, prompt, params, bad_words=words, text=text_of), params)
        for completion in out.outputs:
            want = cumulative_logprob(tiny, prompt, completion.token_ids)
            assert completion.cumulative_logprob == pytest.approx(want, rel=1e-4)
    drain(letters)


def test_one_beam_is_greedy(llm, tiny):
    outs = llm.generate(ids(*PROMPTS), beams(1, 12))
    for prompt, out in zip(PROMPTS, outs, strict=True):
        assert len(out.outputs[0].token_ids) == 12
        tiny.assert_greedy(prompt, out.outputs[0].token_ids)


@pytest.mark.parametrize("width", [5, 8])  # 8: every slot
def test_searches_take_turns(llm, tiny, width):
    params = beams(width, 7, n=3, stop_token_ids=OFTEN)
    outs = llm.generate(ids(*PROMPTS), params)
    for prompt, out in zip(PROMPTS, outs, strict=True):
        assert_found(out.outputs, beam_search(tiny, prompt, params), params)
    drain(llm)


def test_up_to_the_context(llm, tiny):
    (prompt,) = prompts_of([86])
    params = beams(2, None)
    (out,) = llm.generate(ids(prompt), params)
    assert [len(completion.token_ids) for completion in out.outputs] == [10, 10]
    assert_found(out.outputs, beam_search(tiny, prompt, beams(2, 10)), params)


def test_what_can_never_run_is_refused(llm):
    with pytest.raises(ValueError, match="beam_width=9 is more than the 8 sequences that may run at once"):
        llm.generate(ids([1]), beams(9, 4))
    with pytest.raises(ValueError, match="8 beams of a prompt of 5 tokens and up to 60 more may need 121 KV blocks"):
        llm.generate(ids([1]), beams(8, 4)) and llm.generate(ids([1] * 5), beams(8, 60))
    assert not llm.engine.has_work()


@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_token_ids": [5], "stop_token_ids": [5], "min_tokens": 2},  # at once
        {"allowed_token_ids": [5, 6], "bad_words": ["%%", "%&", "&%", "&&"]},  # after a token
    ],
)
def test_no_token_is_left(letters, tiny, fields):
    bad, good = letters.generate(ids(PROMPTS[1], PROMPTS[2]), [beams(2, 5, **fields), beams(2, 5)])
    assert "leave no token to generate" in bad.error
    assert {completion.finish_reason for completion in bad.outputs} == {"error"}
    assert_found(good.outputs, beam_search(tiny, PROMPTS[2], beams(2, 5)), beams(2, 5))


def test_what_has_finished_counts_when_no_token_is_left(letters):
    """Each beam that could go on is at an end after its first token; a finished one is there."""
    words = ["%%", "%&", "&%", "&&", "%'", "&'"]
    params = beams(3, 5, allowed_token_ids=[5, 6, 7], bad_words=words, stop_token_ids=[7])
    (out,) = letters.generate(ids(PROMPTS[1]), params)
    assert out.error is None
    assert [(c.token_ids, c.finish_reason, c.stop_reason) for c in out.outputs] == [([7], "stop", 7)]


def test_stop_strings_cut_the_text(letters, tiny):
    (free,) = letters.generate(ids(PROMPTS[2]), beams(4, 8))
    texts = [completion.text for completion in free.outputs]
    stops = [texts[0][4:6], texts[1][2:4], texts[2][3]]
    plain, whole = (
        letters.generate(ids(PROMPTS[2]), beams(4, 8, stop=stops, include_stop_str_in_output=included))[0]
        for included in (False, True)
    )
    params = beams(4, 8, stop=stops)
    assert_found(plain.outputs, beam_search(tiny, PROMPTS[2], params, text=text_of), params)
    for completion, other in zip(plain.outputs, whole.outputs, strict=True):
        assert completion.token_ids == other.token_ids and other.text == text_of(other.token_ids)
        assert completion.text == other.text.removesuffix(completion.stop_reason or "")
    assert {len(c.stop_reason) for c in plain.outputs if c.stop_reason} >= {1, 2}
    drain(letters)


def test_end_of_sequence_is_no_stop_reason(letters, monkeypatch):
    (one,) = letters.generate(ids(PROMPTS[2]), beams(3, 6))
    eos = one.outputs[0].token_ids[2]
    monkeypatch.setattr(letters.engine.intake, "eos_ids", frozenset([eos]))
    ended, ignored = letters.generate(ids(PROMPTS[2]) * 2, [beams(3, 6), beams(3, 6, ignore_eos=True)])
    assert seen(ignored) == seen(one)
    ends = [c for c in ended.outputs if c.finish_reason == "stop"]
    assert ends and all(c.token_ids[-1] == eos and c.stop_reason is None for c in ends)
    assert all(c.text == text_of(c.token_ids[:-1]) for c in ends)
    drain(letters)


@pytest.mark.parametrize(
    "fields", [{"logprobs": 3}, {"logprob_token_ids": [2, 50]}, {"logprobs": 0, "logit_bias": {9: 6.0}}]
)
def test_log_probabilities(llm, tiny, fields):
    params = beams(4, 8, prompt_logprobs=2, stop_token_ids=OFTEN[:6], **fields)
    outs = llm.generate(ids(*PROMPTS), params)
    for prompt, out in zip(PROMPTS, outs, strict=True):
        assert out.prompt_logprobs[0] is None
        check_logprobs(tiny, [], prompt, out.prompt_logprobs, 2)
        for completion in out.outputs:
            num_top = len(params.logprob_token_ids or []) if params.logprob_token_ids else params.logprobs
            check_logprobs(tiny, prompt, completion.token_ids, completion.logprobs, num_top)
            pairs = zip(completion.logprobs, completion.token_ids, strict=True)
            total = sum(found[token].logprob for found, token in pairs)
            assert completion.cumulative_logprob == pytest.approx(total, abs=1e-4)
            if params.logprob_token_ids:
                assert all({2, 50} <= set(found) for found in completion.logprobs)
    drain(llm)


def check_logprobs(tiny, before, tokens, found, num_others) -> None:
    """Each position has its token first, and says what the model does."""
    rows = log_softmax(tiny.logits([*before, *tokens]))
    assert len(found) == len(tokens)
    for i, token in enumerate(tokens):
        if not before and i == 0:
            continue
        row = rows[len(before) + i - 1]
        assert next(iter(found[i])) == token and num_others <= len(found[i]) <= num_others + 1
        for other, logprob in found[i].items():
            assert logprob.logprob == pytest.approx(row[other], abs=2e-4)
            larger = np.count_nonzero(row > row[other] + 1e-4), np.count_nonzero(row > row[other] - 1e-4)
            assert logprob.rank is None or larger[0] < logprob.rank <= larger[1]


def test_a_stream_has_one_output(llm):
    params = beams(3, 6, output_kind=RequestOutputKind.DELTA)
    streamed = list(llm.stream(ids(*PROMPTS), [params, params, greedy(4), params]))
    for i in (0, 1, 3):
        (out,) = [out for index, out in streamed if index == i]
        assert out.finished and len(out.outputs) == 3
        assert seen(out) == seen(llm.generate(ids(PROMPTS[i]), beams(3, 6))[0])
    assert len([out for index, out in streamed if index == 2]) == 4


def test_async(llm, monkeypatch):
    monkeypatch.setattr(build, "build_engine", lambda model, **_: llm.engine)
    monkeypatch.setattr(llm.engine, "close", lambda: None)  # it is the others' too
    served = AsyncLLM()

    async def collect(prompt):
        return [out async for out in served.generate(ids(prompt)[0], beams(3, 6))]

    async def main():
        return await asyncio.gather(*map(collect, PROMPTS))

    outputs = asyncio.run(main())
    served.close()
    for prompt, of_one in zip(PROMPTS, outputs, strict=True):
        (out,) = of_one
        assert out.finished and seen(out) == seen(llm.generate(ids(prompt), beams(3, 6))[0])
