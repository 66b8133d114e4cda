"""instructor: answers as pydantic models, by tools and by schemas, whole and in parts."""

import os

import instructor
import openai
import pydantic


class City(pydantic.BaseModel, extra="forbid"):  # a small model would add keys until it is cut
    size: int = pydantic.Field(le=99)
    is_large: bool


MESSAGES = [{"role": "user", "content": "Describe a city."}]
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(openai.OpenAI(timeout=300), mode=mode)
    given = {"model": os.environ["MODEL"], "messages": MESSAGES, "max_tokens": 120, "max_retries": 0}
    assert isinstance(client.chat.completions.create(response_model=City, **given), City), mode
    *_, last = client.chat.completions.create_partial(response_model=City, **given)
    assert isinstance(last.is_large, bool), mode
