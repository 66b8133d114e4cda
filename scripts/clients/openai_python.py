"""openai for Python: models, text, chat, streams, tools, parsed answers, responses, errors."""

import os
from typing import Literal

import openai
import pydantic

client = openai.OpenAI(base_url=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"], timeout=300)
MODEL = os.environ["MODEL"]
HI = [{"role": "user", "content": "What is the capital of France?"}]


class City(pydantic.BaseModel):
    name: Literal["Paris", "Rome"]
    size: int


TOOL = {"type": "function", "function": {"name": "find_city", "strict": True, "parameters": {
    "type": "object", "properties": {"name": {"type": "string", "maxLength": 12}}, "required": ["name"],
    "additionalProperties": False}}}  # fmt: skip

assert MODEL in [model.id for model in client.models.list()]
text = client.completions.create(model=MODEL, prompt="The sea", max_tokens=8, n=2, logprobs=2)
assert len(text.choices) == 2 and text.usage.completion_tokens == 16 and text.choices[0].logprobs.tokens
chat = client.chat.completions.create(model=MODEL, messages=HI, max_tokens=8, temperature=0)
assert chat.choices[0].message.content and chat.usage.completion_tokens <= 8
stream = client.chat.completions.create(
    model=MODEL, messages=HI, max_tokens=8, temperature=0, stream=True, stream_options={"include_usage": True}
)
chunks = list(stream)
streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
assert streamed == chat.choices[0].message.content
assert chunks[-1].usage.completion_tokens == chat.usage.completion_tokens
parsed = client.chat.completions.parse(model=MODEL, messages=HI, response_format=City, max_tokens=60)
assert parsed.choices[0].message.parsed.name in ("Paris", "Rome")
called = client.chat.completions.create(
    model=MODEL, messages=HI, tools=[TOOL], tool_choice="required", max_tokens=100, parallel_tool_calls=False
)
(call,) = called.choices[0].message.tool_calls
assert call.function.name == "find_city"
result = {"role": "tool", "tool_call_id": call.id, "content": "It is in France."}
again = client.chat.completions.create(
    model=MODEL, messages=[*HI, called.choices[0].message, result], tools=[TOOL], tool_choice="none", max_tokens=8
)
assert again.choices[0].message.content
response = client.responses.create(model=MODEL, input="Hello", max_output_tokens=8)
assert response.output_text and response.usage.output_tokens <= 8
for wrong, kind in (
    ({"model": "none"}, openai.NotFoundError),
    ({"max_tokens": -1}, openai.BadRequestError),
    ({"messages": [{"role": "user", "content": "word " * 5000}]}, openai.BadRequestError),
):
    try:
        client.chat.completions.create(**{"model": MODEL, "messages": HI} | wrong)
    except kind:
        continue
    raise AssertionError(f"{wrong} was accepted")
try:
    client.with_options(api_key="wrong").models.list()
except openai.AuthenticationError:
    pass
else:
    raise AssertionError("a wrong key was accepted")
