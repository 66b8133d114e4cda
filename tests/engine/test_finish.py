"""How a completion ends: length, end of sequence, stop tokens and strings; what is refused at the door."""

import pytest

from jaxllm import SamplingParams
from jaxllm.errors import EngineDeadError
from jaxllm.text.prompts import parse_params, parse_prompts
from tests.engine.test_step_contract import Letters
from tests.tiny import MAX_LEN, greedy, ids, make_llm, prompts_of

PROMPT = prompts_of([9])[0]


@pytest.fixture(scope="module")
def text_llm(tiny):
    with make_llm(tiny.model, tokenizer=Letters()) as llm:
        yield llm


@pytest.fixture
def expected(text_llm):
    """The greedy continuation of PROMPT, which the tests end early."""
    return text_llm.generate(ids(PROMPT), greedy(20))[0].outputs[0].token_ids


def finish(llm, params):
    (out,) = llm.generate(ids(PROMPT), params)
    assert out.finished and out.prompt_token_ids == PROMPT
    llm.engine.scheduler.check()
    return out.outputs[0]


def test_length(text_llm, expected):
    out = finish(text_llm, greedy(7))
    assert (out.finish_reason, out.stop_reason, out.token_ids) == ("length", None, expected[:7])
    out = finish(text_llm, greedy(None))
    assert out.finish_reason == "length" and len(PROMPT) + len(out.token_ids) == MAX_LEN


def test_stop_token_ids(text_llm, expected):
    stop = expected[6]
    first = expected.index(stop)
    out = finish(text_llm, greedy(20, stop_token_ids=[stop]))
    assert (out.finish_reason, out.stop_reason, out.token_ids) == ("stop", stop, expected[: first + 1])
    assert out.text == Letters().decode(expected[:first])  # the stop token is no text
    (last,) = [o for _, o in text_llm.stream(ids(PROMPT), greedy(20, stop_token_ids=[stop])) if o.finished]
    assert last.outputs[0] == out


def test_end_of_sequence(text_llm, expected, monkeypatch):
    eos = expected[4]
    monkeypatch.setattr(text_llm.engine.intake, "eos_ids", frozenset([eos]))
    params = dict(temperature=0.0, max_tokens=20)
    out = finish(text_llm, SamplingParams(**params))
    first = expected.index(eos)
    assert (out.finish_reason, out.stop_reason, out.token_ids) == ("stop", None, expected[: first + 1])
    assert finish(text_llm, SamplingParams(**params, ignore_eos=True)).token_ids == expected


def test_min_tokens_masks_every_stop_before(text_llm, expected, monkeypatch):
    monkeypatch.setattr(text_llm.engine.intake, "eos_ids", frozenset([expected[2]]))
    params = SamplingParams(temperature=0.0, max_tokens=20, min_tokens=9, stop_token_ids=[expected[5], 95])
    out = finish(text_llm, params)
    assert len(out.token_ids) >= 9
    assert not {expected[2], expected[5], 95} & set(out.token_ids[:8])


@pytest.mark.parametrize("length", [1, 2, 5])
def test_stop_strings(text_llm, expected, length):
    text = Letters().decode(expected)
    stop = text[8 : 8 + length]
    at = text.index(stop)
    out = finish(text_llm, greedy(20, stop=["never seen", stop]))
    assert (out.finish_reason, out.stop_reason, out.text) == ("stop", stop, text[:at])
    assert out.token_ids == expected[: at + length]


def test_a_stop_string_completed_by_the_last_token_wins(text_llm, expected):
    text = Letters().decode(expected)
    stop = text[5:7]
    end = text.index(stop) + 2
    out = finish(text_llm, greedy(end, stop=stop))
    assert (out.finish_reason, out.stop_reason) == ("stop", stop)


def test_streamed_text_grows_and_ends_like_the_whole(text_llm, expected):
    seen = [out for _, out in text_llm.stream(ids(PROMPT), greedy(20))]
    texts = [out.outputs[0].text for out in seen]
    assert all(later.startswith(earlier) for earlier, later in zip(texts, texts[1:], strict=False))
    assert texts[-1] == Letters().decode(expected) and len(texts) == 20


def test_leaving_a_stream_aborts_it(text_llm):
    stream = text_llm.stream(ids(PROMPT, [1, 2]), greedy(50))
    next(stream)
    stream.close()
    assert not text_llm.engine.scheduler.has_work()
    text_llm.generate(ids([1]), greedy(1))
    text_llm.engine.scheduler.check()


def test_a_string_prompt_and_its_forms(text_llm):
    want = text_llm.generate(ids([40, 41]), greedy(3))[0].outputs
    for prompt in ("HI", {"prompt": "HI"}, ["HI"]):
        (out,) = text_llm.generate(prompt, greedy(3))
        assert (out.prompt, out.prompt_token_ids, out.outputs) == ("HI", [40, 41], want)
    assert text_llm.generate([], greedy(3)) == []


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ([[]], None, "no tokens"),
        ([[1, 96]], None, r"token id 96 is not an integer in \[0, 95\]"),
        ([[1, -1]], None, "token id -1"),
        ([[1, "2"]], None, "token id '2'"),
        ([[1, True]], None, "token id True"),
        ([[1] * MAX_LEN], None, f"has {MAX_LEN} tokens, but max_model_len={MAX_LEN}"),
        ([[1]], SamplingParams(stop_token_ids=[96]), "outside the vocabulary"),
        ([[1], [2]], [SamplingParams()] * 2, "2 entries for 3 prompts"),
    ],
)
def test_bad_requests_are_refused_before_anything_runs(llm, prompts, params, message):
    with pytest.raises(ValueError, match=message):
        llm.generate(ids([3], *prompts), params)
    assert not llm.engine.has_work()


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (3, "expected a string, a dict"),
        ([3.0], "expected a string or a dict"),
        ("text", "needs a tokenizer"),
        ({"text": "x"}, "'prompt' or 'prompt_token_ids'"),
        ({"prompt_token_ids": "12"}, "expected a list of integers"),
    ],
)
def test_bad_prompts(prompt, message):
    with pytest.raises(ValueError, match=message):
        parse_prompts(prompt, None)


@pytest.mark.parametrize("params", ["greedy", 3, [SamplingParams(), None]])
def test_bad_params(params):
    with pytest.raises(ValueError, match="sampling_params must be a SamplingParams or a list of them"):
        parse_params(params, 2)


def test_a_closed_engine_says_so(tiny):
    llm = make_llm(tiny.model, max_num_seqs=1, max_num_batched_tokens=1)
    llm.close()
    with pytest.raises(EngineDeadError, match="closed"):
        llm.generate(ids([1]), greedy(1))
