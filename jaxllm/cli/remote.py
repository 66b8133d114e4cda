"""A client of servers with OpenAI's API, for the commands that talk to one."""

import argparse
import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Generator, Sequence
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

from jaxllm.cli.environment import KEY_VARIABLES, api_keys
from jaxllm.errors import JaxLLMError
from jaxllm.outputs import CompletionOutput, RequestOutput

DEFAULT_URL = "http://127.0.0.1:8000/v1"
MOST_TOKENS = 2**31  # of a conversation, as the server checks it
_TIMEOUT_S = 600.0  # between two pieces of an answer
_MOST_BYTES = 1 << 20  # of an answer that is no stream
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class RemoteError(JaxLLMError):
    """A server that can't be reached, or that refused a request."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirects, which would take the API key to another address."""

    def redirect_request(self, *args: Any) -> None:
        return None


def add_remote_arguments(parser: argparse.ArgumentParser, *, url: str | None) -> None:
    """Adds the options that say which server. `url` is the default."""
    add = parser.add_argument_group("server").add_argument
    shown = f" (default: {url})" if url else ""
    add("--url", default=url, metavar="URL", help=f"of a server with OpenAI's API, as in {DEFAULT_URL}{shown}")
    add("--model-name", metavar="NAME", help="one of the server's models (default: its first)")
    add("--api-key", metavar="KEY", help=f"the server's key (default: {' or '.join(KEY_VARIABLES)} of the environment)")


def open_remote(arguments: argparse.Namespace) -> "Remote":
    """Raises `ValueError` for what is no URL, and `RemoteError` if nobody answers there."""
    keys = api_keys([arguments.api_key] if arguments.api_key else None)
    return Remote(arguments.url, keys[0] if keys else None, arguments.model_name)


class Remote:
    """One model of a server. `stream` and `chat_prompt` are for a conversation."""

    def __init__(self, url: str, key: str | None, model: str | None):
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no URL of a server; give one as {DEFAULT_URL}")
        self._url, self._headers = url.rstrip("/"), {"Content-Type": "application/json"}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"
        proxies = {} if parts.hostname in _LOOPBACK else None  # a proxy is elsewhere, and knows another loopback
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler(proxies), _NoRedirect())
        self.model = model or self._first_model()

    def _first_model(self) -> str:
        with self._open("/models") as answer:
            try:
                return json.loads(answer.read(_MOST_BYTES))["data"][0]["id"]
            except (ValueError, LookupError, TypeError) as error:
                raise RemoteError(f"{self._url}/models lists no model; give --model-name, and check --url") from error

    def events(self, path: str, body: dict[str, Any]) -> Generator[dict[str, Any]]:
        """The choices of a streamed answer. Raises `RemoteError`; closing the iterator ends the request."""
        with self._open(path, body | {"model": self.model, "stream": True}) as answer:
            try:
                for line in answer:
                    if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                        event = json.loads(line[6:])
                        if event.get("error"):
                            raise RemoteError(f"the server ended the answer: {event['error'].get('message')}")
                        yield from event.get("choices", ())
            except OSError as error:
                raise RemoteError(f"the connection to {self._url} broke: {error}") from error
            except (ValueError, AttributeError) as error:
                raise RemoteError(f"{self._url} sends no events of OpenAI's API ({error}); check --url") from error

    def _open(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, self._headers)  # noqa: S310 - http or https, as checked above
        try:
            return closing(self._opener.open(request, timeout=_TIMEOUT_S))
        except urllib.error.HTTPError as error:
            with error:
                advice = "" if error.code != 404 or self._url.endswith("/v1") else f"; did you mean {self._url}/v1?"
                raise RemoteError(f"{self._url} answers {error.code}: {_message(error)}{advice}") from error
        except urllib.error.URLError as error:
            raise RemoteError(self._unreachable(error.reason)) from error
        except OSError as error:
            raise RemoteError(self._unreachable(error)) from error

    def _unreachable(self, reason: Any) -> str:
        if isinstance(reason, ConnectionRefusedError):
            return f"no server listens at {self._url}; start one with jaxllm serve, or give another --url"
        if isinstance(reason, ssl.SSLCertVerificationError):
            why = reason.verify_message
            return f"{self._url} has a certificate that is not trusted ({why}); name its file in SSL_CERT_FILE"
        return f"{self._url} can't be reached ({reason}); check --url"

    def chat_prompt(self, messages: Sequence[dict[str, str]], *, chat_template: None = None) -> dict[str, Any]:
        return {"messages": messages, "prompt_token_ids": []}  # whose number the server checks

    def stream(self, prompt: dict[str, Any], fields: dict[str, Any]) -> Generator[tuple[int, RequestOutput]]:
        """As `LLM.stream`, for one conversation; `fields` are those of the request. A piece of the answer counts as one
        token. What the server refuses is an output with `error`."""
        output = CompletionOutput(index=0)
        whole = RequestOutput(request_id="0", prompt="", prompt_token_ids=[], outputs=[output])
        try:
            with closing(self.events("/chat/completions", {"messages": prompt["messages"], **fields})) as choices:
                for choice in choices:
                    if piece := choice["delta"].get("content"):
                        output.text += piece
                        output.token_ids.append(0)
                        yield 0, whole
        except RemoteError as error:
            whole.error = str(error)
        whole.finished = True
        yield 0, whole


def _message(error: urllib.error.HTTPError) -> str:
    try:
        message = json.loads(error.read(_MOST_BYTES))["error"]["message"]
    except (ValueError, LookupError, TypeError, OSError):
        return f"{error.reason}; check --url"
    return f"{message}; give --api-key" if error.code == 401 else str(message)
