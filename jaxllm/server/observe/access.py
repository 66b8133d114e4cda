"""What is told of each HTTP request: in the log, without anything that its client wrote, and to the metrics."""

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

log = logging.getLogger("jaxllm.access")

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
OTHER = "other"
CLIENT_GONE = 499  # the status of a request whose client left before there was one
_DIGEST_CHARS = 8


@dataclass
class RequestRecord:
    """One HTTP request. `route` and `method` are from closed sets."""

    request_id: str
    route: str
    method: str
    started: float = field(default_factory=time.monotonic)
    status: int = CLIENT_GONE
    error: str | None = None  # the code of an error that ended a stream
    key: bytes | None = None  # the digest of the API key
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0


Report = Callable[[RequestRecord], None]


def log_request(record: RequestRecord) -> None:
    """Writes one line, with the beginning of the key's digest."""
    log.info(
        "%s %s %d %.3f s in=%d out=%d %s key=%s%s",
        record.method,
        record.route,
        record.status,
        time.monotonic() - record.started,
        record.num_prompt_tokens,
        record.num_output_tokens,
        record.request_id,
        "-" if record.key is None else record.key.hex()[:_DIGEST_CHARS],
        "" if record.error is None else f" error={record.error}",
    )


def method_of(method: str) -> str:
    return method if method in METHODS else OTHER


class RouteNames:
    """The names of an app's routes. Names with a parameter stand for all its values."""

    def __init__(self, paths: Iterable[str]):
        self._exact: set[str] = set()
        self._prefixes: dict[str, str] = {}
        for path in paths:
            prefix, parameter, _ = path.partition("{")
            if parameter:
                self._prefixes[prefix] = path
            else:
                self._exact.add(path)

    def name(self, path: str) -> str:
        if path in self._exact:
            return path
        return next((name for prefix, name in self._prefixes.items() if path.startswith(prefix)), OTHER)
