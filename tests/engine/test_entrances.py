"""What every entrance shares: requests are checked once, failures name their cause, and outputs cost what is read."""

import asyncio
import pickle
from collections import Counter

import jax
import pytest
from flax import nnx

from jaxllm import AsyncLLM, RequestOutputKind
from jaxllm.engine import intake, logprobs, output, prepare
from jaxllm.errors import EngineError
from tests.engine.test_step_contract import Letters
from tests.tiny import Tiny, greedy, ids, make_llm, prompts_of, tokens

SIZES = dict(max_num_seqs=4, max_num_batched_tokens=8, block_size=4, num_blocks=64)
PROMPT = prompts_of([9])[0]


class Counting(Letters):
    """Counts what is encoded."""

    def __init__(self):
        self.encoded: Counter[str] = Counter()

    def encode(self, text):
        self.encoded[text] += 1
        return super().encode(text)


@pytest.fixture
def checks(monkeypatch):
    """How often a prompt was looked through."""
    calls = Counter()
    check = intake.check_request

    def counting(*args):
        calls["check"] += 1
        return check(*args)

    monkeypatch.setattr(prepare, "check_request", counting)
    return calls


def test_a_request_is_checked_once(tiny, checks):
    letters = Counting()
    params = greedy(3, bad_words=["ab"], stop="never seen")
    with make_llm(tiny.model, tokenizer=letters, max_num_seqs=2, max_num_batched_tokens=8) as llm:
        llm.generate(ids(PROMPT), params)
        assert checks["check"] == 1 and letters.encoded == {"ab": 1, " ab": 1}
        list(llm.generate_iter([({"prompt_token_ids": PROMPT}, params)]))
        assert checks["check"] == 2 and letters.encoded == {"ab": 2, " ab": 2}


def test_a_request_is_checked_once_in_a_thread_too(tiny, checks):
    letters = Counting()

    async def main():
        llm = AsyncLLM(tiny.model, tokenizer=letters, **SIZES)
        async for out in llm.generate({"prompt_token_ids": PROMPT}, greedy(3, bad_words=["ab"])):
            last = out
        await asyncio.to_thread(llm.close)
        return last

    assert asyncio.run(main()).finished
    assert checks["check"] == 1 and letters.encoded == {"ab": 1, " ab": 1}


def test_donated_parameters_are_named_as_the_cause():
    tiny = Tiny()
    with make_llm(tiny.model, max_num_seqs=2, max_num_batched_tokens=8) as llm:
        stream = llm.stream(ids(PROMPT), greedy(30))
        next(stream)
        for leaf in jax.tree.leaves(nnx.state(tiny.model, nnx.Param)):
            leaf.delete()  # as a training step does that takes them donated
        with pytest.raises(EngineError, match="deleted.*update_params"):
            llm.generate(ids(PROMPT), greedy(3))
        last = [out for _, out in stream][-1]
        assert last.outputs[0].finish_reason == "error" and "update_params" in last.error
        other = Tiny(seed=1)
        llm.update_params(nnx.state(other.model, nnx.Param))
        other.assert_greedy(PROMPT, tokens(llm.generate(ids(PROMPT), greedy(3)))[0])


def test_many_requests_end_after_few_steps_if_all_fail(llm, monkeypatch):
    calls = []

    def failing(plan):
        calls.append(1)
        raise jax.errors.JaxRuntimeError("INTERNAL: the device fell off\nand more that nobody reads")

    monkeypatch.setattr(llm.engine.runner, "dispatch_forward", failing)
    with pytest.raises(EngineError, match="INTERNAL: the device fell off$"):
        llm.generate(ids(*prompts_of([3] * 50)), greedy(3))
    assert len(calls) < 10
    monkeypatch.undo()
    assert len(tokens(llm.generate(ids(PROMPT), greedy(3)))[0]) == 3


def test_who_waits_for_a_slot_was_queued(tiny):
    """Also where the prompt is all cached, so that its first row is a decode."""
    with make_llm(tiny.model, max_num_seqs=1, max_num_batched_tokens=16, max_model_len=64) as llm:
        prompt = prompts_of([33])[0]
        llm.generate(ids(prompt), greedy(10))
        first, cached, last = llm.generate(ids(prompt, prompt, [1, 2, 3]), greedy(10))
        assert cached.num_cached_tokens == 32
        assert 0 < first.queued_s < cached.queued_s < last.queued_s


@pytest.fixture
def made(monkeypatch):
    """How many positions' dictionaries were made."""
    calls = Counter()

    def counting(*args):
        calls["made"] += 1
        return logprobs.to_logprobs(*args)

    monkeypatch.setattr(output, "to_logprobs", counting)
    return calls


def test_logprobs_are_made_when_they_are_looked_at(llm, made):
    params = greedy(6, logprobs=2, prompt_logprobs=1)
    (out,) = llm.generate(ids(PROMPT), params)
    assert made["made"] == 0
    found = out.outputs[0].logprobs
    assert isinstance(found, list) and len(found) == made["made"] == 6
    assert out.outputs[0].logprobs is found and made["made"] == 6
    assert len(out.prompt_logprobs) == 9 and out.prompt_logprobs[0] is None and made["made"] == 6 + 8


def test_those_of_a_stream_are_made_once_and_are_snapshots(llm, made):
    outs = [out for _, out in llm.stream(ids(PROMPT), greedy(6, logprobs=1))]
    assert [len(out.outputs[0].logprobs) for out in outs] == [1, 2, 3, 4, 5, 6] and made["made"] == 6
    deltas = [out for _, out in llm.stream(ids(PROMPT), greedy(6, logprobs=1, output_kind=RequestOutputKind.DELTA))]
    assert [list(out.outputs[0].logprobs[0])[0] for out in deltas] == outs[-1].outputs[0].token_ids


def test_they_survive_pickling(llm):
    (out,) = llm.generate(ids(PROMPT), greedy(3, logprobs=1, prompt_logprobs=1))
    copy = pickle.loads(pickle.dumps(out))  # noqa: S301 - our own
    assert copy == out and len(copy.outputs[0].logprobs) == 3 and len(copy.prompt_logprobs) == 9
