"""The server's settings, checked once."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from jaxllm.checkpoint.files import is_gguf

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Raises `ValueError` naming field, value and remedy."""

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_names: tuple[str, ...] = ("default",)  # answers use the first
    api_keys: tuple[str, ...] = ()
    isolates_keys: bool = True  # each API key has its own part of the prefix cache
    max_queued_requests: int = 256  # waiting requests, in addition to those that the engine runs at once
    request_timeout_s: float = 600.0
    shutdown_timeout_s: float = 30.0  # for requests to finish after SIGTERM
    watchdog_s: float = 9.5  # without progress, after which the engine counts as hung
    keep_alive_s: float = 15.0  # between comments in an idle stream
    chat_template: str | None = None
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    vllm_metric_names: bool = False
    max_body_bytes: int = 8 << 20
    max_header_bytes: int = 64 << 10
    max_connections: int = 4096
    header_timeout_s: float = 30.0  # for a connection to send a complete request head
    body_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port={self.port} must be in [0, 65535]; 0 takes a free one")
        if not self.served_model_names or not all(self.served_model_names):
            raise ValueError("served_model_names must hold at least one name, and no empty ones")
        if not all(key.strip() == key and key for key in self.api_keys):
            raise ValueError("an API key must not be empty, or begin or end with a space")
        for field in dataclasses.fields(self):
            if field.name.endswith("_s") and not 0 <= getattr(self, field.name) < 1e9:
                raise ValueError(f"{field.name}={getattr(self, field.name)} must be a number of seconds, not negative")
        if self.max_queued_requests < 0:
            raise ValueError(f"max_queued_requests={self.max_queued_requests} must not be negative")

    @property
    def is_loopback(self) -> bool:
        return self.host in LOOPBACK


def model_names(model: str | None, given: list[str] | None) -> tuple[str, ...]:
    """The names that requests may use for the model: the given ones, or its directory's or file's."""
    if given:
        return tuple(dict.fromkeys(given))
    if model is None:
        return ("default",)
    path = Path(model)
    name = path.stem if is_gguf(path) else path.resolve().name
    return tuple(dict.fromkeys([name, model]))
