"""The server's settings, checked once."""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxllm.hub.names import served_names

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
HOST = re.compile(r"[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]")


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Raises `ValueError` naming field, value and remedy."""

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_names: tuple[str, ...] = ("default",)  # answers use the first
    api_keys: tuple[str, ...] = ()
    admin_api_key: str | None = None  # of the routes that change the engine, which are there if it is set
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
    logs_requests: bool = False  # a line for each HTTP request, without what it says
    # The sampling parameters of requests without their own: the model's ("auto"), the API's ("vllm"), or a directory's.
    generation_config: str = "auto"
    override_generation_config: Mapping[str, Any] = field(default_factory=dict)  # some of these
    default_chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # a request's own come first
    # Whether requests may have a `priority`: "fcfs" no, "priority" yes; None: unless several API keys share the server.
    scheduling_policy: str | None = None
    root_path: str = ""  # that a proxy takes off the URLs
    allowed_hosts: tuple[str, ...] = ()  # names of this server in URLs, beside loopback's; "*": any
    allowed_origins: tuple[str, ...] = ()  # of web pages that may use this server (CORS)
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None  # with which the server speaks HTTPS
    ssl_ca_certs: str | None = None
    ssl_cert_reqs: int = 0  # 0: clients need no certificate; 2: they do
    ssl_ciphers: str | None = None
    uvicorn_log_level: str = "warning"
    max_body_bytes: int = 8 << 20
    max_body_memory_bytes: int = 64 << 20  # of all bodies that requests hold at once
    max_header_bytes: int = 64 << 10
    max_connections: int = 4096
    keep_alive_timeout_s: int = 5  # after an answer, for the connection's next request to begin
    header_timeout_s: float = 30.0  # for a connection to send a complete request head
    body_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port={self.port} must be in [0, 65535]; 0 takes a free one")
        if not self.served_model_names or not all(self.served_model_names):
            raise ValueError("served_model_names must hold at least one name, and no empty ones")
        if not all(key.strip() == key and key for key in self.api_keys):
            raise ValueError("an API key must not be empty, or begin or end with a space")
        if self.admin_api_key is not None and (self.admin_api_key in self.api_keys or not self.admin_api_key.strip()):
            raise ValueError("the admin API key must not be empty, or one of the others; give one of its own")
        for name in (own.name for own in dataclasses.fields(self) if own.name.endswith("_s")):
            if not 0 <= getattr(self, name) < 1e9:
                raise ValueError(f"{name}={getattr(self, name)} must be a number of seconds, not negative")
        if self.max_queued_requests < 0:
            raise ValueError(f"max_queued_requests={self.max_queued_requests} must not be negative")
        if self.max_body_memory_bytes // 4 * 3 < self.max_body_bytes:
            raise ValueError(
                f"max_body_memory_bytes={self.max_body_memory_bytes} is too little for a body of {self.max_body_bytes} "
                f"bytes, beside which a quarter stays free; give {self.max_body_bytes * 3 // 2} or more"
            )
        if self.scheduling_policy not in (None, "fcfs", "priority"):
            raise ValueError(f"scheduling_policy={self.scheduling_policy!r} must be fcfs or priority")
        if bad := [name for name in self.allowed_hosts if name != "*" and HOST.fullmatch(name) is None]:
            raise ValueError(f"allowed_hosts={bad[0]!r} is no host name; give one like llm.example.org, without a port")
        if self.root_path and not self.root_path.startswith("/") or self.root_path.endswith("/"):
            raise ValueError(f"root_path={self.root_path!r} must begin with a slash, and not end with one")
        if self.allow_credentials and "*" in self.allowed_origins:
            raise ValueError(
                "allow_credentials with allowed_origins * lets every web page act as its visitor; name them"
            )
        if self.ssl_certfile is None and (self.ssl_keyfile or self.ssl_ca_certs or self.ssl_ciphers):
            raise ValueError("ssl_keyfile, ssl_ca_certs and ssl_ciphers need ssl_certfile, the server's certificate")
        if self.ssl_cert_reqs and self.ssl_ca_certs is None:
            raise ValueError(
                f"ssl_cert_reqs={self.ssl_cert_reqs} needs ssl_ca_certs, which clients' certificates are of"
            )

    @property
    def hosts(self) -> frozenset[str] | None:
        """The names that it answers to; None: any."""
        if "*" in self.allowed_hosts or not (self.allowed_hosts or self.is_loopback):
            return None
        return LOOPBACK | {self.host} | {name.lower().strip("[]") for name in self.allowed_hosts}

    @property
    def has_priorities(self) -> bool:
        if self.scheduling_policy is None:
            return len(self.api_keys) < 2
        return self.scheduling_policy == "priority"

    @property
    def is_loopback(self) -> bool:
        return self.host in LOOPBACK

    @property
    def scheme(self) -> str:
        return "http" if self.ssl_certfile is None else "https"


def model_names(model: str | None, given: list[str] | None) -> tuple[str, ...]:
    """The names that requests may use for the model: the given ones, or what its user calls it."""
    if given:
        return tuple(dict.fromkeys(given))
    if model is None:
        return ("default",)
    return served_names(model)
