"""What the server itself reads of a model: its tokenizer, its chat template, what it recommends."""

from pathlib import Path
from typing import Any

from jaxllm.checkpoint.generation_config import default_sampling_params
from jaxllm.sampling_params import SamplingParams
from jaxllm.server.config import ServerConfig
from jaxllm.server.openai.prepare import Model
from jaxllm.text.tokenizer import Tokenizer

_EMBEDDED = Path(__file__).parents[1] / "default_model"
_RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def read_model(config: ServerConfig, model_dir: str | None, *, created: int = 0) -> Model:
    """Of a directory in Hugging Face format; None: the model in the package. Raises `ModelFormatError`, and
    `ValueError` for a chat template that is not there."""
    directory = _EMBEDDED if model_dir is None else Path(model_dir)
    tokenizer = Tokenizer.from_dir(directory)
    return Model(
        names=config.served_model_names,
        tokenizer=tokenizer,
        defaults=recommended(directory),
        created=created,
        chat_template=None if config.chat_template is None else tokenizer.chat.source(config.chat_template),
    )


def recommended(model_dir: Path) -> dict[str, Any]:
    """The sampling parameters that the directory sets, where they are not the usual ones."""
    theirs, usual = default_sampling_params(model_dir), SamplingParams()
    given = {name: getattr(theirs, name) for name in _RECOMMENDED}
    return {name: value for name, value in given.items() if value != getattr(usual, name)}
