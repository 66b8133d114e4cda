"""Chat templates: the same text as transformers makes of them, for any template that a model may bring."""

import copy
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.errors import ModelFormatError
from jaxllm.text import chat_template as chat
from jaxllm.text.chat_template import ChatTemplates, read_templates
from jaxllm.text.foreign_tokenizer import wrap
from jaxllm.text.messages import parse_messages
from jaxllm.text.tokenizer import Tokenizer
from tests.chat_model import TURNS, save_tokenizer

TEMPLATES = {file.stem: file.read_text() for file in (Path(__file__).parents[1] / "chat_templates").glob("*.jinja")}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": 'The weather <now> & "later" in a town, e.g. Zürich',
            "parameters": {
                "type": "object",
                "required": ["town"],
                "properties": {
                    "town": {"type": "string"},
                    "days": {"type": "array", "items": {"type": ["integer", "null"]}},
                    "unit": {"enum": ["C", "F"]},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]
CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "weather", "arguments": {"town": 'Zürich "<b>"', "days": [1, None], "max": 0.5, "x": True}},
}
CONVERSATIONS = {
    "one turn": [{"role": "user", "content": "Hi"}],
    "system": [{"role": "system", "content": " Be <brief> & 'kind'. "}, {"role": "user", "content": "  Hé\n\n"}],
    "three turns": [
        {"role": "user", "content": "1 + 1 = {{ ?"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\n2 "},
        {"role": "user", "content": "and {% if %} 东京 🙂"},
    ],
    "tool call": [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": '{"rain": false}', "tool_call_id": "abcdefghi"},
        {"role": "assistant", "content": "No."},
        {"role": "user", "content": "Thanks"},
    ],
    "answered": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello "}],
}


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("jinja2")
    return transformers.AutoTokenizer.from_pretrained(save_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    return Tokenizer.from_dir(save_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def outcome(render, *args, **kwargs) -> str | type:
    """What is rendered, or that it is refused."""
    try:
        return render(*args, **kwargs)
    except Exception:  # noqa: BLE001 - each has its own class
        return ValueError


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_equals_transformers(name, ours, theirs):
    refused = 0
    for messages in CONVERSATIONS.values():
        for options in (
            {"add_generation_prompt": True},
            {"add_generation_prompt": False},
            {"add_generation_prompt": False, "continue_final_message": True},
            {"add_generation_prompt": True, "tools": TOOLS},
        ):
            options, own = options | {"chat_template": TEMPLATES[name]}, {"enable_thinking": False, "date": "2 Jan"}
            want = outcome(theirs.apply_chat_template, copy.deepcopy(messages), tokenize=False, **options, **own)
            got = outcome(ours.chat.render, messages, chat_template_kwargs=own, **options)
            assert got == want
            refused += got is ValueError
            if isinstance(want, str):
                assert ours.encode(want, add_special_tokens=False) == theirs(want, add_special_tokens=False).input_ids
    assert refused <= 8, "templates that take no tools refuse some, none refuses all"


# Half characters are no text; the four separators are whitespace to Python, not to Unicode.
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x1c\x1d\x1e\x1f"), max_size=30)


@settings(max_examples=60, deadline=None)
@given(contents=st.lists(TEXT, min_size=1, max_size=4), name=st.sampled_from(sorted(TEMPLATES)), flag=st.booleans())
def test_equals_transformers_for_any_text(contents, name, flag, ours, theirs):
    roles = ["user", "assistant"] * 2
    messages = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]
    options = {"chat_template": TEMPLATES[name], "add_generation_prompt": flag}
    want = theirs.apply_chat_template(messages, tokenize=False, date="", **options)
    assert ours.chat.render(messages, chat_template_kwargs={"date": ""}, **options) == want


SYSTEM = {"role": "system", "content": "Be kind."}


def test_the_built_in_formats(ours):
    text = ours.chat.render([SYSTEM, *TURNS], chat_template="vicuna")
    assert text == "<s>Be kind. USER: Hi ASSISTANT: Hello.</s>USER: Bye ASSISTANT:"
    assert ours.chat.render(TURNS[:1], chat_template="vicuna").startswith("<s>A chat between a curious user and an")
    text = ours.chat.render([SYSTEM, *TURNS], chat_template="llama2")
    assert text == "<s>[INST] <<SYS>>\nBe kind.\n<</SYS>>\n\nHi [/INST] Hello. </s><s>[INST] Bye [/INST]"
    for name in ("vicuna", "llama2"):
        assert ChatTemplates().render(TURNS, chat_template=name) == ours.chat.render(TURNS, chat_template=name)
        with pytest.raises(ValueError, match="refuses the conversation: after an optional .* take turns"):
            ours.chat.render([TURNS[1]], chat_template=name)


def test_an_answer_is_continued_where_it_ends(ours):
    for name in ("zephyr", "chatml", "llama2", "vicuna"):
        text = ours.chat.render(
            TURNS[:2], chat_template=TEMPLATES[name], add_generation_prompt=False, continue_final_message=True
        )
        assert text.endswith("Hello.")
    with pytest.raises(ValueError, match="set add_generation_prompt=False to continue"):
        ours.chat.render(TURNS, chat_template="vicuna", continue_final_message=True)
    with pytest.raises(ValueError, match="leaves out or changes the last message"):
        ours.chat.render(TURNS, chat_template="{", add_generation_prompt=False, continue_final_message=True)


def test_where_templates_come_from(tmp_path):
    folder = save_tokenizer(tmp_path / "model", "{{ 'configuration' }}")
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "old file"}))

    def rendered(**options):
        return Tokenizer.from_dir(folder).chat.render(TURNS, **options)

    assert rendered() == "configuration"
    (folder / "chat_template.jinja").write_text("é {{ bos_token }}{{ eos_token }}{{ pad_token }}")
    assert rendered() == "é <s></s>"
    assert rendered(chat_template=folder / "chat_template.json") == '{"chat_template": "old file"}'
    assert rendered(chat_template=str(folder / "chat_template.jinja")) == "é <s></s>"
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").unlink()
    assert rendered() == "old file"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("rag")
    assert rendered(chat_template="rag") == "rag"
    with pytest.raises(ValueError, match=r"no default one.*the model's own \(rag\)"):
        rendered()


def test_named_templates(tmp_path):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools {{ tools|length }}"}]
    chat = Tokenizer.from_dir(save_tokenizer(tmp_path / "model", named)).chat
    assert chat.render(TURNS) == chat.render(TURNS, tools=[]) == "plain"
    assert chat.render(TURNS, tools=TOOLS) == "tools 2"
    assert chat.render(TURNS, chat_template="tool_use", tools=TOOLS[:1]) == "tools 1"


@pytest.mark.parametrize("template", [3, [1], [{"name": "default"}], [{"name": [], "template": "x"}], {"a": None}])
def test_a_damaged_configuration(tmp_path, template):
    with pytest.raises(ModelFormatError, match="tokenizer_config.json: chat_template must be"):
        Tokenizer.from_dir(save_tokenizer(tmp_path / "model", template))


def test_damaged_files(tmp_path, monkeypatch):
    folder = save_tokenizer(tmp_path / "model")
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelFormatError, match="chat_template.jinja cannot be read"):
        read_templates(folder)
    monkeypatch.setattr(chat, "MAX_TEMPLATE_BYTES", 100)
    (folder / "chat_template.jinja").write_text("x" * 101)
    with pytest.raises(ModelFormatError, match="chat_template.jinja holds a chat template of more than 100"):
        read_templates(folder)


def test_a_model_without_a_template_names_the_choices(ours):
    with pytest.raises(ValueError, match=r"has no chat template; choose .*\(llama2, vicuna\), a file, or Jinja"):
        ours.chat.render(TURNS)
    for wanted in ("vicunia", "no/such/file", "x" * 5000, 3):
        with pytest.raises(ValueError, match=r"chat template .* is unknown; give .*\(llama2, vicuna\), a file"):
            ours.chat.render(TURNS, chat_template=wanted)


def test_contents_in_parts_and_arguments_in_json():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert parse_messages([{"role": "user", "content": parts, "name": None}]) == [{"role": "user", "content": "a\nb"}]
    given = [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}]}]
    (message,) = parse_messages(given)
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    assert given[0]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}', "the caller's list stays as it was"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "a list of at least one message"),
        ("hi", "a list of at least one message"),
        ({"role": "user"}, "a list of at least one message"),
        (["hi"], "message 0 must be a dict with role and content"),
        ([{"content": "a"}], "message 0 must be a dict with role"),
        ([{"role": "user"}], "message 0 .* has neither content nor tool_calls"),
        ([*TURNS, {"role": "user", "content": 3}], "content of message 3 must be a string"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "only text is supported"),
        ([{"role": "user", "content": ["a"]}], "only text is supported"),
        ([{"role": "assistant", "tool_calls": "f"}], "tool_calls of message 0 must be a list"),
        ([{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}], "arguments that are not JSON"),
    ],
)
def test_what_is_no_conversation(messages, message):
    with pytest.raises(ValueError, match=message):
        parse_messages(messages)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tools": [print]}, "tools must be a list of JSON schemas"),
        ({"chat_template_kwargs": {"tokenize": True, "messages": []}}, "has messages, tokenize, which chat itself"),
        ({"chat_template_kwargs": [1]}, "must be a dict"),
    ],
)
def test_what_a_template_cannot_be_told(options, message, ours):
    with pytest.raises(ValueError, match=message):
        ours.chat.render(TURNS, chat_template="vicuna", **options)


def test_a_tokenizer_of_transformers_brings_its_template(theirs):
    bare = wrap(theirs)
    with pytest.raises(ValueError, match="has no chat template"):
        bare.chat.render(TURNS)
    with_template = copy.deepcopy(theirs)
    with_template.chat_template = TEMPLATES["zephyr"]
    tokenizer = wrap(with_template)
    text = tokenizer.chat.render(TURNS)
    assert text == with_template.apply_chat_template(TURNS, tokenize=False, add_generation_prompt=True)
    assert tokenizer.encode(text, add_special_tokens=False) == with_template(text, add_special_tokens=False).input_ids


class Own:
    """A user's tokenizer with its own way to write conversations."""

    def encode(self, text):
        return list(text.encode())

    def decode(self, ids):
        return bytes(ids).decode(errors="replace")

    def apply_chat_template(self, messages, tokenize, add_generation_prompt, style="plain", **options):
        assert not tokenize
        if style == "ids":
            return [1, 2]
        return f"{style}: {messages[-1]['content']}{'>' if add_generation_prompt else ''}{options or ''}"


def test_an_object_with_its_own_apply_chat_template():
    chat = wrap(Own()).chat
    assert chat.render(TURNS) == "plain: Bye>"
    assert chat.render(TURNS, chat_template_kwargs={"style": "loud"}, add_generation_prompt=False) == "loud: Bye"
    assert "'tools'" in chat.render(TURNS, tools=TOOLS)
    assert chat.render(TURNS, chat_template="llama2").startswith("<s>[INST]")
    with pytest.raises(ValueError, match="returned a list for tokenize=False"):
        chat.render(TURNS, chat_template_kwargs={"style": "ids"})
