"""litellm: chat, streams, text, a schema, tools, and the exceptions that its routers go by."""

import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it asks nobody else

import litellm  # noqa: E402 - it looks at the variable

MODEL, BASE, KEY = os.environ["MODEL"], os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
HI = [{"role": "user", "content": "Hello"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9}}, "required": ["a"],
          "additionalProperties": False}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "find", "parameters": SCHEMA}}


def ask(kind: str = "hosted_vllm", **fields):
    given = {"model": f"{kind}/{MODEL}", "messages": HI, "api_base": BASE, "api_key": KEY, "max_tokens": 8}
    return litellm.completion(**given | fields)


for kind in ("hosted_vllm", "openai"):
    answer = ask(kind)
    assert answer.choices[0].message.content and answer.usage.completion_tokens <= 8
    assert "".join(chunk.choices[0].delta.content or "" for chunk in ask(kind, stream=True))
text = litellm.text_completion(
    model=f"text-completion-openai/{MODEL}", prompt="The sea", api_base=BASE, api_key=KEY, max_tokens=8
)
assert text.choices[0].text
described = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
assert '"a"' in ask(response_format=described, max_tokens=60).choices[0].message.content
assert ask(tools=[TOOL], tool_choice="required", max_tokens=100).choices[0].message.tool_calls
for wrong, kind in (
    ({"api_key": "wrong"}, litellm.AuthenticationError),
    ({"messages": [{"role": "user", "content": "word " * 5000}]}, litellm.ContextWindowExceededError),
    ({"model": "hosted_vllm/none"}, litellm.NotFoundError),
    ({"max_tokens": -1}, litellm.BadRequestError),
):
    try:
        ask(**wrong)
    except kind:
        continue
    except Exception as error:
        raise AssertionError(f"{list(wrong)}: {type(error).__name__}, not {kind.__name__}: {error}") from error
    raise AssertionError(f"{wrong} was accepted")
