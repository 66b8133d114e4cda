"""SmolLM2 behind the server: chats as transformers continues them, a schema and a tool by the official client."""

import json

import pytest

from jaxllm.checkpoint.formats import open_checkpoint
from tests.real.smollm2 import CITY, QUESTIONS, SMOLLM2
from tests.server.http.test_serve import serving

openai = pytest.importorskip("openai")
jsonschema = pytest.importorskip("jsonschema")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CODE = "import sys\nfrom jaxllm.serve import main\nsys.exit(main(sys.argv[1:]))"
WEATHER = {
    "name": "get_weather",
    "description": "The weather in a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def client(real):
    options = ("--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "8", "--tool-call-parser", "hermes")
    with serving("--model", str(real(SMOLLM2)), *options, code=CODE) as command:
        yield openai.OpenAI(base_url=f"http://127.0.0.1:{command.port}/v1", api_key="none", timeout=120)


@pytest.fixture(scope="module")
def model(client):
    return client.models.list().data[0].id


@pytest.mark.parametrize("stream", [False, True])
def test_chats(client, model, greedy_tokens, real, stream):
    tokenizer = open_checkpoint(real(SMOLLM2)).tokenizer()
    for question in QUESTIONS[:3]:
        chat = [{"role": "user", "content": question}]
        answer = client.chat.completions.create(
            model=model, messages=chat, temperature=0, max_tokens=24, stream=stream, seed=0
        )
        text = (
            "".join(chunk.choices[0].delta.content or "" for chunk in answer)
            if stream
            else answer.choices[0].message.content
        )
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True)
        tokens = tokenizer.encode(text, add_special_tokens=False)
        assert text and greedy_tokens(prompt, tokens) == tokens


def test_a_schema_is_followed(client, model):
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Describe Rome as JSON."}],
        response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}},
        max_tokens=150,
        temperature=0,
    )
    jsonschema.validate(json.loads(answer.choices[0].message.content), CITY)


def test_a_tool_is_called(client, model):
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "How is the weather in Rome?"}],
        tools=[{"type": "function", "function": WEATHER}],
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        max_tokens=100,
        temperature=0,
    )
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    jsonschema.validate(json.loads(call.function.arguments), WEATHER["parameters"])
