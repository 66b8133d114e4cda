"""Tokenizers and chat templates of published models, against transformers' reading of the same files."""

import random

import pytest

from jaxllm.text.tokenizer import Tokenizer
from tests.real.hard_text import TEXTS

jinja2 = pytest.importorskip("jinja2")
transformers = pytest.importorskip("transformers")

NAMES = ("llama3_1", "qwen3", "gemma3", "deepseek_v3", "gptoss")
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": 'The weather in a city, "now" & later <soon>.',
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
QUESTION = {"role": "user", "content": "Wie ist das Wetter in Köln? 'a' \"b\" <c>"}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Köln", "n": 1.5}}}],
}
CHATS = {
    "a question": {"conversation": [QUESTION]},
    "a system message": {"conversation": [{"role": "system", "content": " Be brief. "}, QUESTION]},
    "turns": {"conversation": [QUESTION, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nSun."}, QUESTION]},
    "tools": {"conversation": [QUESTION], "tools": [WEATHER]},
    "a tool's answer": {
        "conversation": [QUESTION, CALL, {"role": "tool", "name": "get_weather", "content": '{"t": 21}'}],
        "tools": [WEATHER],
    },
    "no thinking": {"conversation": [QUESTION], "enable_thinking": False},
}


@pytest.fixture(scope="module", params=NAMES)
def pair(request, real):
    """Our tokenizer of a directory, and transformers'."""
    directory = real(request.param)
    return Tokenizer.from_dir(directory), transformers.PreTrainedTokenizerFast.from_pretrained(directory)


def test_ids(pair):
    ours, theirs = pair
    for text in (*TEXTS, "".join(TEXTS)):
        for special in (False, True):
            assert ours.encode(text, add_special_tokens=special) == theirs.encode(text, add_special_tokens=special)
    assert ours.eos_token_id == theirs.eos_token_id


def test_texts(pair):
    ours, theirs = pair
    for ids in sequences(ours):
        for skip in (False, True):
            want = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert ours.decode(ids, skip_special_tokens=skip) == want


def test_streams_add_up_to_the_text(pair):
    ours, _ = pair
    for ids in sequences(ours):
        for skip in (False, True):
            stream = ours.stream(skip)
            text = "".join(stream.push(token) for token in ids) + stream.flush()
            assert text == ours.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("chat", CHATS)
def test_chats(pair, chat):
    ours, theirs = pair
    if theirs.chat_template is None:
        pytest.skip("it has no chat template")
    for options in ({"add_generation_prompt": True}, {"add_generation_prompt": False}):
        options |= CHATS[chat]
        try:
            want = theirs.apply_chat_template(**options, tokenize=False)
        except jinja2.TemplateError:
            with pytest.raises(ValueError):
                ours.apply_chat_template(**options, tokenize=False)
        else:
            assert ours.apply_chat_template(**options, tokenize=False) == want


def sequences(tokenizer):
    """Ids of texts, and ids at random, which make broken characters."""
    yield from (tokenizer.encode(text) for text in TEXTS)
    draw = random.Random(0)
    yield from ([draw.randrange(tokenizer.vocab_size) for _ in range(40)] for _ in range(50))
