"""Conversations to text: chooses a chat template and renders it."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxllm.argument_checks import a_type
from jaxllm.checkpoint.files import read_json
from jaxllm.errors import ModelFormatError
from jaxllm.text.messages import parse_kwargs, parse_messages, parse_tools
from jaxllm.text.sandbox import TemplateSandbox

MAX_TEMPLATE_BYTES = 1_000_000
TEMPLATE_FILE, OLD_TEMPLATE_FILE = "chat_template.jinja", "chat_template.json"
TEMPLATE_DIR = "additional_chat_templates"
BUILT_IN = {file.stem: file for file in (Path(__file__).parent / "templates").glob("*.jinja")}
_END_MARK = "<end of what is to be continued> "  # the trailing space shows whether the template strips content


class ChatTemplates:
    """A tokenizer's chat templates by name, and the special tokens that they may write ("bos_token": "<s>")."""

    def __init__(self, templates: Mapping[str, str] | None = None, special_tokens: Mapping[str, str] | None = None):
        self.templates, self.special_tokens = dict(templates or {}), dict(special_tokens or {})
        self._renderer = TemplateSandbox()

    def render(
        self,
        messages: Any,
        *,
        tools: Any = None,
        chat_template: Any = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Any = None,
    ) -> str:
        """The text of one conversation, special tokens included. Arguments as in `LLM.chat`. Raises `ValueError`."""
        if add_generation_prompt and continue_final_message:
            raise ValueError(
                "add_generation_prompt opens a new message and continue_final_message continues the last one; "
                "set add_generation_prompt=False to continue"
            )
        messages, tools = parse_messages(messages), parse_tools(tools)
        template = self.source(chat_template, has_tools=tools is not None)
        end = _mark_end(messages) if continue_final_message else None
        variables = {
            **self.special_tokens,
            **parse_kwargs(chat_template_kwargs),
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._renderer.render(template, variables)
        return text if end is None else _cut_end(text, end)

    def source(self, wanted: Any, *, has_tools: bool = False) -> str:
        """The template `wanted`: a name, a file, Jinja source, or None for the model's own. Raises `ValueError`."""
        names = [*(["tool_use"] if has_tools else []), "default"] if wanted is None else [wanted]
        for name in names:
            if isinstance(name, str) and name in self.templates:
                return self.templates[name]
        if isinstance(wanted, str) and wanted in BUILT_IN:
            return _read(BUILT_IN[wanted])
        if isinstance(wanted, str) and ("{" in wanted or "\n" in wanted):
            return _bounded(wanted, "the chat template")
        if isinstance(wanted, str | Path) and os.path.isfile(wanted):
            return _read(Path(wanted))
        choices = f"a built-in one ({', '.join(sorted(BUILT_IN))}), a file, or Jinja source"
        own = f"one of the model's own ({', '.join(self.templates)}), " if self.templates else ""
        if wanted is not None:
            raise ValueError(f"chat template {str(wanted)!r:.200} is unknown; give {own}{choices}")
        none = "has chat templates but no default one" if self.templates else "has no chat template"
        raise ValueError(f"the model {none}; choose a chat_template: {own}{choices}")


class ForeignChatTemplates(ChatTemplates):
    """Renders through `apply_chat_template` of a user's tokenizer that does not expose its template source."""

    def __init__(self, tokenizer: Any):
        super().__init__()
        self._tokenizer = tokenizer

    def render(
        self, messages: Any, *, chat_template: Any = None, add_generation_prompt: bool = True, **options: Any
    ) -> str:
        options["add_generation_prompt"] = add_generation_prompt
        if chat_template is not None:
            return super().render(messages, chat_template=chat_template, **options)
        variables = parse_kwargs(options.pop("chat_template_kwargs", None))
        given = {name: value for name, value in options.items() if value or name == "add_generation_prompt"}
        text = self._tokenizer.apply_chat_template(parse_messages(messages), tokenize=False, **given, **variables)
        if not isinstance(text, str):
            kind = f"{type(self._tokenizer).__name__}.apply_chat_template"
            raise ValueError(f"{kind} returned {a_type(text)} for tokenize=False, not a string")
        return text


def read_templates(model_dir: Path) -> dict[str, str]:
    """The Jinja sources in a model directory by name: "default", "tool_use", or the model's own names.

    As in transformers, separate template files take precedence over `tokenizer_config.json`. Raises
    `ModelFormatError`.
    """
    found = {file.stem: file for file in sorted((model_dir / TEMPLATE_DIR).glob("*.jinja"))}
    if (model_dir / TEMPLATE_FILE).is_file():
        found["default"] = model_dir / TEMPLATE_FILE
    try:
        if found:
            return {name: _read(file) for name, file in found.items()}
        for file in (model_dir / "tokenizer_config.json", model_dir / OLD_TEMPLATE_FILE):
            stored = read_json(file).get("chat_template") if file.is_file() else None
            if stored is not None:
                return parse_templates(stored, str(file))
    except ValueError as error:
        raise ModelFormatError(str(error)) from error
    return {}


def parse_templates(stored: Any, source: str) -> dict[str, str]:
    """Parses what `tokenizer_config.json` and transformers store: a string, a list of named templates, or a dict."""
    if isinstance(stored, list) and all(isinstance(entry, dict) for entry in stored):
        named = [(entry.get("name"), entry.get("template")) for entry in stored]
    elif isinstance(stored, dict):
        named = list(stored.items())
    else:
        named = [("default", stored)]
    if not all(isinstance(text, str) for pair in named for text in pair):
        raise ValueError(f"{source}: chat_template must be a string, or a list of objects with name and template")
    return {name: _bounded(text, source) for name, text in named}


def _read(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_TEMPLATE_BYTES + 1)
        return _bounded(data.decode(), str(file))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the chat template {file} cannot be read: {error}") from error


def _bounded(text: str, source: str) -> str:
    if len(text) > MAX_TEMPLATE_BYTES:
        raise ValueError(f"{source} holds a chat template of more than {MAX_TEMPLATE_BYTES} characters; replace it")
    return text


def _mark_end(messages: list[dict[str, Any]]) -> str:
    """Appends a mark to the last message, so that the template's own text after it can be cut; returns the content."""
    content = messages[-1].get("content")
    if content is None:
        raise ValueError("continue_final_message needs a last message with content to continue")
    messages[-1]["content"] = content + _END_MARK
    return content


def _cut_end(text: str, content: str) -> str:
    mark = _END_MARK.rstrip()
    end = text.rfind(mark)
    if end < 0 or content.strip() not in text:
        raise ValueError(
            "continue_final_message: the chat template leaves out or changes the last message, so it can't be continued"
        )
    is_stripped = not text.startswith(_END_MARK, end)
    return text[:end].rstrip() if is_stripped else text[:end]
