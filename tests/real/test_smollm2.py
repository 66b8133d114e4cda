"""SmolLM2-135M-Instruct, as its GGUF file holds it, against transformers' reading of the same file, in float32."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from jaxllm import LLM, SamplingParams, StructuredOutputs
from tests.real.smollm2 import CHATS, CITY, PROMPTS, SMOLLM2, TURNS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NUM_TOKENS, BLOCK_SIZE = 16, 32
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
LICENSE = (Path(__file__).parents[2] / "LICENSE").read_text()


@pytest.fixture(scope="module")
def llm(real):
    with LLM(
        real(SMOLLM2), dtype="float32", max_model_len=4608, block_size=BLOCK_SIZE, num_blocks=640, max_num_seqs=64
    ) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(llm, greedy_tokens):
    """Prompts as ids, and the greedy continuation of each by itself, which is the reference's."""
    prompts = [llm.tokenizer.encode(prompt) for prompt in PROMPTS]
    prompts += [llm.chat_prompt(chat)["prompt_token_ids"] for chat in CHATS]
    assert len(prompts) == 20
    tokens = [tokens_of(llm, [prompt])[0] for prompt in prompts]
    assert [greedy_tokens(*pair) for pair in zip(prompts, tokens, strict=True)] == tokens
    assert all(len(ids) == NUM_TOKENS or ids[-1] == llm.tokenizer.eos_token_id for ids in tokens)
    return prompts, tokens


def token_prompts(prompts):
    return [{"prompt_token_ids": ids} for ids in prompts]


def tokens_of(llm, prompts):
    return [output.outputs[0].token_ids for output in llm.generate(token_prompts(prompts), GREEDY)]


def test_64_at_once(llm, alone):
    prompts, tokens = alone
    assert tokens_of(llm, (prompts * 4)[:64]) == (tokens * 4)[:64]


def test_preempted(real, alone):
    prompts, tokens = alone
    with LLM(real(SMOLLM2), dtype="float32", max_model_len=128, block_size=8, num_blocks=24, max_num_seqs=16) as llm:
        assert tokens_of(llm, prompts) == tokens
        assert llm.stats().num_preemptions > 0


def test_logprobs(llm, logprobs, alone):
    prompts, _ = alone
    params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=5)
    for prompt, output in zip(prompts, llm.generate(token_prompts(prompts), params), strict=True):
        (completion,) = output.outputs
        want = logprobs([*prompt, *completion.token_ids])[len(prompt) - 1 :]
        for row, given in zip(want, completion.logprobs, strict=True):
            assert len(given) >= 5
            for token, logprob in given.items():
                assert logprob.logprob == pytest.approx(row[token], abs=1e-3)


def test_a_prompt_of_4000_tokens(llm, greedy_tokens):
    prompt = (llm.tokenizer.encode(LICENSE) * 2)[:4000]
    (tokens,) = tokens_of(llm, [prompt])
    assert greedy_tokens(prompt, tokens) == tokens


def test_perplexity(llm, logprobs):
    ids = llm.tokenizer.encode(LICENSE)
    (output,) = llm.generate(token_prompts([ids]), SamplingParams(max_tokens=1, prompt_logprobs=0))
    ours = [given[token].logprob for token, given in zip(ids[1:], output.prompt_logprobs[1:], strict=True)]
    theirs = logprobs(ids)[np.arange(len(ids) - 1), ids[1:]]
    assert math.exp(-np.mean(ours)) == pytest.approx(math.exp(-np.mean(theirs)), rel=1e-3)


def test_a_conversation_is_cached_turn_by_turn(llm, greedy_tokens):
    llm.engine.scheduler.pool.forget_keys()
    chat, known = [], 0  # tokens that the engine has computed of the turns before
    for turn in TURNS:
        chat.append({"role": "user", "content": turn})
        prompt = llm.chat_prompt(chat)["prompt_token_ids"]
        (output,) = llm.generate(token_prompts([prompt]), GREEDY)
        (completion,) = output.outputs
        assert greedy_tokens(prompt, completion.token_ids) == completion.token_ids
        assert output.num_cached_tokens == known // BLOCK_SIZE * BLOCK_SIZE
        known = len(prompt) + len(completion.token_ids) - 1
        chat.append({"role": "assistant", "content": completion.text})


def test_beams(llm, smollm2, alone):
    import torch

    prompts, _ = alone
    params = SamplingParams(beam_width=4, n=4, max_tokens=8)
    for prompt in (prompts[0], prompts[10]):
        (output,) = llm.generate(token_prompts([prompt]), params)
        given = torch.tensor([prompt])
        want = smollm2.generate(
            given,
            attention_mask=torch.ones_like(given),
            num_beams=4,
            num_return_sequences=4,
            max_new_tokens=8,
            do_sample=False,
            pad_token_id=llm.tokenizer.eos_token_id,
        )[:, len(prompt) :]
        assert [completion.token_ids for completion in output.outputs] == want.tolist()


def test_structured_output(llm):
    jsonschema = pytest.importorskip("jsonschema")
    params = SamplingParams(temperature=0.0, max_tokens=120, structured_outputs=StructuredOutputs(json=CITY))
    (output,) = llm.chat([{"role": "user", "content": "Describe Paris as JSON."}], params)
    jsonschema.validate(json.loads(output.outputs[0].text), CITY)
