"""What the server process needs of a model: tokenizer, chat template, recommended sampling parameters."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from jaxllm.checkpoint.explain import not_a_checkpoint
from jaxllm.checkpoint.files import local
from jaxllm.checkpoint.formats import open_checkpoint
from jaxllm.checkpoint.generation_config import default_sampling_params
from jaxllm.default_model import DEFAULT_MODEL
from jaxllm.grammar.sandbox import GrammarSandbox
from jaxllm.sampling_params import drawing_fields
from jaxllm.server.config import ServerConfig
from jaxllm.server.http.errors import invalid, unknown_model
from jaxllm.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class ServedModel:
    """The served model as the server process knows it."""

    names: tuple[str, ...]
    tokenizer: Tokenizer | None
    defaults: dict[str, Any] = field(default_factory=dict)  # fields of `SamplingParams` that the model recommends
    chat_template: str | None = None  # Jinja source; None: the tokenizer's own
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)  # its variables where a request has none
    created: int = 0  # seconds since 1970

    @property
    def name(self) -> str:
        return self.names[0]

    @cached_property
    def grammars(self) -> GrammarSandbox:
        return GrammarSandbox(self.tokenizer)

    @property
    def template_source(self) -> str:
        """The source of the chat templates, as far as known; it shows which formats the model uses."""
        if self.chat_template is not None:
            return self.chat_template
        return "" if self.tokenizer is None else "\n".join(self.tokenizer.chat.templates.values())

    @property
    def has_chat(self) -> bool:
        """Whether the model has a chat template."""
        own = {} if self.tokenizer is None else self.tokenizer.chat.templates
        return self.chat_template is not None or "default" in own

    def known_name(self, name: str | None) -> str:
        """The name that an answer has: the one asked for, or the model's first. Raises `APIError` 404 for others."""
        if name is not None and name not in self.names:
            raise unknown_model(name, list(self.names))
        return name or self.name

    def need_tokenizer(self, param: str) -> Tokenizer:
        if self.tokenizer is None:
            raise invalid("this server has no tokenizer; send prompts as token ids", param)
        return self.tokenizer


def read_model(
    config: ServerConfig, model: str | None, tokenizer_path: str | None = None, *, created: int = 0
) -> ServedModel:
    """Reads a directory in Hugging Face format or a GGUF file; None: the model of the package. `tokenizer_path` is
    another that has the tokenizer. Raises `ModelFormatError`, and `ValueError` for what `config` has wrong."""
    path = local(DEFAULT_MODEL if model is None else model)
    if not path.exists():
        raise not_a_checkpoint(path)
    checkpoint = open_checkpoint(path)
    tokenizer = (checkpoint if tokenizer_path is None else open_checkpoint(tokenizer_path)).tokenizer()
    return ServedModel(
        names=config.served_model_names,
        tokenizer=tokenizer,
        defaults=drawing_fields(
            default_sampling_params(checkpoint, config.generation_config, config.override_generation_config)
        ),
        chat_template_kwargs=dict(config.default_chat_template_kwargs),
        created=created,
        chat_template=None if config.chat_template is None else tokenizer.chat.source(config.chat_template),
    )
