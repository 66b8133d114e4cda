"""The errors that clients see: one exception, one body, one renderer."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec

from jaxllm.errors import EngineDeadError, RequestEndedError

log = logging.getLogger(__name__)

RETRY_AFTER_S = 2
_NO_RETRY = {"x-should-retry": "false"}


class APIError(Exception):
    """An answer with an error status. The client sees `message`, so it never contains the text of an internal error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.type, self.code, self.param = status, message, type, code, param
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def encode(self) -> bytes:
        return msgspec.json.encode(self.body())


def invalid(message: str, param: str | None = None, code: str | None = "invalid_value") -> APIError:
    return APIError(400, message, param=param, code=code)


def unsupported(param: str, message: str) -> APIError:
    return APIError(400, message, param=param, code="unsupported_parameter")


def too_long(message: str, param: str) -> APIError:
    return APIError(400, message, param=param, code="context_length_exceeded")


def unauthorized() -> APIError:
    return APIError(
        401,
        "Incorrect API key provided, or none; send it as: Authorization: Bearer KEY",  # litellm knows it by this
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


def unknown_model(name: str, known: list[str]) -> APIError:
    message = f"the model {name[:100]!r} does not exist here; this server has {', '.join(known)}"
    return APIError(404, message, code="model_not_found", param="model")


def unavailable(message: str, code: str = "server_is_overloaded") -> APIError:
    return APIError(
        503, message, type="service_unavailable_error", code=code, headers={"Retry-After": str(RETRY_AFTER_S)}
    )


def deadline_exceeded(limit_s: float) -> APIError:
    message = f"the request was not finished within {limit_s:g} s; ask for fewer tokens, or try when less is running"
    return APIError(504, message, type="timeout_error", code="deadline_exceeded", headers=_NO_RETRY)


def engine_dead(request_id: str) -> APIError:
    message = f"the engine stopped; the server must be restarted (request {request_id})"
    return APIError(500, message, type="server_error", code="engine_dead", headers=_NO_RETRY)


def internal(request_id: str) -> APIError:
    message = f"an internal error ended the request; the server's log has more under {request_id}"
    return APIError(500, message, type="server_error", code="internal_error", headers=_NO_RETRY)


def as_api_error(error: BaseException, request_id: str) -> APIError:
    """Converts any exception to what the client may see; the rest goes to the log."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, RequestEndedError):
        log.warning("request %s was ended: %s", request_id, error)
        return unavailable(f"the request was ended: {error}; try again later", code="request_aborted")
    if isinstance(error, EngineDeadError):
        log.error("request %s: %s", request_id, error)
        return engine_dead(request_id)
    log.error("request %s failed", request_id, exc_info=error)
    return internal(request_id)


@contextmanager
def refusing(param: str | None, fields: frozenset[str] = frozenset()) -> Iterator[None]:
    """Converts a ValueError, which is about the client's input, to `APIError` 400. A message that begins with the name
    of one of `fields` names the wrong parameter; otherwise it is `param`."""
    try:
        yield
    except ValueError as error:
        message = str(error)
        name = message.split("=", 1)[0].split(" ", 1)[0].rstrip(":")
        raise invalid(message, name if name in fields else param) from error
