"""langchain-openai: invoke, stream, batch, tools with their results, structured answers, errors."""

import os

import openai
import pydantic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

chat = ChatOpenAI(model=os.environ["MODEL"], max_tokens=120, temperature=0)


class City(pydantic.BaseModel):
    """A city."""

    model_config = pydantic.ConfigDict(extra="forbid")  # or a small model goes on with fields of its own
    size: int = pydantic.Field(le=99)


@tool
def find_city(size: int) -> str:
    """Finds a city of a size."""
    return f"a city of {size}"


answer = chat.invoke("Hello")
assert answer.content and answer.usage_metadata["output_tokens"] <= 120
assert "".join(part.content for part in chat.stream("Hello")) == answer.content
assert len(chat.batch(["One", "Two", "Three"])) == 3
for method in ("json_schema", "function_calling"):
    assert isinstance(chat.with_structured_output(City, method=method).invoke("A city"), City), method
bound = chat.bind_tools([find_city], tool_choice="required", parallel_tool_calls=False)
called = bound.invoke("Find a city")
(call,) = called.tool_calls
messages = [HumanMessage("Find a city"), called, ToolMessage("a city of 7", tool_call_id=call["id"])]
assert chat.bind_tools([find_city], tool_choice="none").invoke(messages).content
try:
    chat.invoke("word " * 5000)
except openai.BadRequestError as error:
    assert error.code == "context_length_exceeded", error
else:
    raise AssertionError("a text that is too long was accepted")
