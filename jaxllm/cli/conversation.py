"""A terminal conversation: its messages, and the prompt made of them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Conversation:
    """`render` converts messages to a prompt (`LLM.chat_prompt`); `most_tokens` is the model's context."""

    def __init__(
        self, render: Callable[..., Any], *, most_tokens: int, system: str | None = None, chat_template: Any = None
    ):
        self._render, self._most_tokens, self._chat_template = render, most_tokens, chat_template
        self.system = system
        self.messages: list[dict[str, str]] = []

    def check(self) -> None:
        """Raises `ValueError` with a remedy if the model can't chat."""
        try:
            self._make([{"role": "user", "content": "Hi"}])
        except ValueError as error:
            raise ValueError(f"{error}. Texts can be continued without one: python -m jaxllm.generate") from error

    def say(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    def answered(self, text: str) -> None:
        self.messages.append({"role": "assistant", "content": text})

    def take_back(self) -> None:
        """Removes the last answer. Raises `ValueError` if there is no message to answer."""
        if self.messages and self.messages[-1]["role"] == "assistant":
            self.messages.pop()
        if not self.messages:
            raise ValueError("there is no message yet; write one first")

    def reset(self) -> None:
        self.messages.clear()

    def prompt(self) -> tuple[Any, int]:
        """The prompt, and the number of dropped messages: the oldest ones are dropped until a quarter of the context is
        left for the answer. Raises `ValueError`, and removes the last message, if that alone is too long."""
        room, dropped = self._most_tokens - self._most_tokens // 4, 0
        try:
            made = self._make(self.messages)
            while len(made["prompt_token_ids"]) > room and len(self.messages) > 2:
                del self.messages[:2]  # a message and its answer
                dropped += 2
                made = self._make(self.messages)
            if len(made["prompt_token_ids"]) >= self._most_tokens:
                raise ValueError(
                    f"the prompt has {len(made['prompt_token_ids'])} tokens, but the model's context is "
                    f"{self._most_tokens}; shorten it"
                )
        except ValueError:
            self.messages.pop()
            raise
        return made, dropped

    def _make(self, messages: list[dict[str, str]]) -> Any:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return self._render([*system, *messages], chat_template=self._chat_template)

    def save(self, file: str) -> None:
        """Writes the messages as JSON, in the format of chat requests. Raises `ValueError`, `OSError`."""
        if not file:
            raise ValueError("name a file, as in: /save chat.json")
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        Path(file).write_text(json.dumps([*system, *self.messages], ensure_ascii=False, indent=2) + "\n")
