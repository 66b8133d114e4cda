"""SmolLM2-135M-Instruct, as its GGUF file holds it, against transformers' reading of the same file, in float32."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from jaxllm import LLM, SamplingParams, StructuredOutputs
from tests.real.smollm2 import CHATS, CITY, PROMPTS, TURNS

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.slow

GREEDY = SamplingParams(temperature=0, max_tokens=32)
LICENSE = (Path(__file__).parents[2] / "LICENSE").read_text()


@pytest.fixture(scope="module")
def llm(real):
    with LLM(real("smollm2.gguf"), dtype="float32", max_model_len=4608, num_blocks=640, max_num_seqs=64) as llm:
        yield llm


@pytest.fixture(scope="module")
def wanted(llm, reference):
    """Prompts as ids, and the reference's greedy continuations."""
    prompts = [llm.tokenizer.encode(prompt) for prompt in PROMPTS]
    prompts += [llm.chat_prompt(chat)["prompt_token_ids"] for chat in CHATS]
    return prompts, [reference(ids, GREEDY.max_tokens) for ids in prompts]


@torch.no_grad()
def logprobs_of(model, ids):
    """`[len(ids) - 1, vocab]`: of each token after those before it."""
    return torch.log_softmax(model(torch.tensor([ids])).logits[0, :-1].double(), -1).numpy()


def token_prompts(prompts):
    return [{"prompt_token_ids": ids} for ids in prompts]


def ids_of(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def test_greedy_tokens_alone_and_together(llm, wanted):
    prompts, tokens = wanted
    assert len(prompts) == 20
    assert [ids_of(llm.generate([prompt], GREEDY))[0] for prompt in token_prompts(prompts)] == tokens
    together = ids_of(llm.generate(token_prompts(prompts * 4)[:64], GREEDY))
    assert together == (tokens * 4)[:64]


def test_greedy_tokens_under_preemption(real, wanted):
    prompts, tokens = wanted
    with LLM(real("smollm2.gguf"), dtype="float32", max_model_len=256, num_blocks=12, max_num_seqs=16) as llm:
        assert ids_of(llm.generate(token_prompts(prompts), GREEDY)) == tokens
        assert llm.stats().num_preemptions > 0


def test_logprobs(llm, smollm2, wanted):
    prompts, _ = wanted
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=5)
    for prompt, output in zip(prompts, llm.generate(token_prompts(prompts), params), strict=True):
        (completion,) = output.outputs
        want = logprobs_of(smollm2, [*prompt, *completion.token_ids])[len(prompt) - 1 :]
        for row, given in zip(want, completion.logprobs, strict=True):
            assert len(given) >= 5
            for token, logprob in given.items():
                assert logprob.logprob == pytest.approx(row[token], abs=1e-3)


def test_a_prompt_of_4000_tokens(llm, reference):
    ids = (llm.tokenizer.encode(LICENSE) * 2)[:4000]
    assert ids_of(llm.generate(token_prompts([ids]), GREEDY)) == [reference(ids, GREEDY.max_tokens)]


def test_perplexity(llm, smollm2):
    ids = llm.tokenizer.encode(LICENSE)
    (output,) = llm.generate(token_prompts([ids]), SamplingParams(max_tokens=1, prompt_logprobs=0))
    ours = [given[token].logprob for token, given in zip(ids[1:], output.prompt_logprobs[1:], strict=True)]
    theirs = logprobs_of(smollm2, ids)[np.arange(len(ids) - 1), ids[1:]]
    assert math.exp(-np.mean(ours)) == pytest.approx(math.exp(-np.mean(theirs)), rel=1e-3)


def test_a_conversation_is_cached_turn_by_turn(llm, reference):
    llm.engine.scheduler.pool.forget_keys()
    chat = []
    for turn in TURNS:
        chat.append({"role": "user", "content": turn})
        prompt = llm.chat_prompt(chat)["prompt_token_ids"]
        (output,) = llm.generate(token_prompts([prompt]), GREEDY)
        assert ids_of([output]) == [reference(prompt, GREEDY.max_tokens)]
        assert len(chat) == 1 or output.num_cached_tokens > len(prompt) // 2
        chat.append({"role": "assistant", "content": output.outputs[0].text})


def test_beams(llm, reference, wanted):
    prompts, _ = wanted
    params = SamplingParams(beam_width=4, max_tokens=12)
    for prompt in prompts[:4]:
        (output,) = llm.generate(token_prompts([prompt]), params)
        assert output.outputs[0].token_ids == reference(prompt, 12, num_beams=4)


def test_structured_output(llm):
    jsonschema = pytest.importorskip("jsonschema")
    params = SamplingParams(temperature=0, max_tokens=120, structured_outputs=StructuredOutputs(json=CITY))
    (output,) = llm.chat([{"role": "user", "content": "Describe Paris as JSON."}], params)
    jsonschema.validate(json.loads(output.outputs[0].text), CITY)
