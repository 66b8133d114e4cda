"""Where requests ask for text of a certain form. The engine has no grammar masks yet, so that all of it is refused;
what will turn a request into a mask plugs in here."""

from typing import Any

from jaxllm.server.errors import invalid, unsupported
from jaxllm.server.schemas import Sampling

_EXTRAS = (
    "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_decoding_backend",
    "grammar",
)  # fmt: skip
_FORMATS = ("text", "json_object", "json_schema")


def check_format(response_format: dict[str, Any] | None, param: str = "response_format") -> None:
    """Raises `APIError` 400 unless plain text is wanted."""
    kind = None if response_format is None else response_format.get("type")
    if response_format is not None and kind not in _FORMATS:
        raise invalid(f"{param}.type must be one of {', '.join(_FORMATS)}, not {kind!r:.100}", f"{param}.type")
    if kind not in (None, "text"):
        raise unsupported(param, f"{param} of type {kind} is not supported yet: describe the format in the prompt")


def check_grammar(request: Sampling) -> None:
    """Raises `APIError` 400 if the request asks for a form of its output."""
    check_format(request.response_format)
    for name in _EXTRAS:
        if getattr(request, name) is not None:
            raise unsupported(name, f"{name} is not supported yet; describe the format in the prompt")
