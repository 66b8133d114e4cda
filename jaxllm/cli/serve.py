"""`python -m jaxllm.serve`: OpenAI's API over HTTP."""

import argparse
import asyncio
import logging
import os
import secrets
import sys
import time
from collections.abc import Sequence
from typing import Any

from jaxllm.cli.common import add_engine_arguments, located_kwargs, program, run_command

TOOL_PARSERS, REASONING_PARSERS = ("auto", "hermes", "llama", "none"), ("auto", "think", "none")
KEY_VARIABLE = "JAXLLM_API_KEY"


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 after SIGTERM or Ctrl-C, 1 if the engine died, 2 for bad options or models."""
    arguments = _parser().parse_args(argv)
    return run_command(lambda: _run(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program("serve"), description="Serves a model with OpenAI's API.", allow_abbrev=False
    )
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine only)")
    add("--port", type=int, default=8000, help="port to listen on; 0 takes a free one (default: 8000)")
    add("--served-model-name", nargs="+", metavar="NAME", help="model name in requests (default: that of --model)")
    add(
        "--api-key",
        action="append",
        metavar="KEY",
        help=f"key that requests must have; may be given more than once (default: ${KEY_VARIABLE}, or none if unset)",
    )
    add(
        "--prefix-cache-isolation",
        choices=("per-key", "none"),
        default="per-key",
        help="per-key: requests with different API keys do not share cached prompts, whose shorter response time would "
        "reveal other users' prompts; none: they do (default: per-key)",
    )
    add("--max-queued-requests", type=int, default=256, metavar="N", help="most waiting requests (default: 256)")
    add("--request-timeout", type=float, default=600.0, metavar="S", help="most seconds for a request (default: 600)")
    add(
        "--shutdown-timeout",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds for requests to finish after SIGTERM; 0 ends them at once (default: 30)",
    )
    add("--chat-template", metavar="NAME", help="one of the model's own, vicuna, llama2, or a file")
    add("--tool-call-parser", choices=TOOL_PARSERS, default="auto", help="how the model calls tools")
    add("--reasoning-parser", choices=REASONING_PARSERS, default="auto", help="how the model marks its reasoning")
    add(
        "--otlp-traces-endpoint",
        metavar="URL",
        help="send OpenTelemetry spans to this URL, as in http://localhost:4318/v1/traces (extra: otel)",
    )
    add("--vllm-metric-names", action="store_true", help="also publish metrics under vLLM's names")
    add_engine_arguments(parser)
    return parser


def _run(arguments: argparse.Namespace) -> int:
    from jaxllm.server.config import ServerConfig, model_names

    config = ServerConfig(
        host=arguments.host,
        port=arguments.port,
        served_model_names=model_names(arguments.model, arguments.served_model_name),
        api_keys=tuple(arguments.api_key or filter(None, [os.environ.get(KEY_VARIABLE)])),
        isolates_keys=arguments.prefix_cache_isolation == "per-key",
        max_queued_requests=arguments.max_queued_requests,
        request_timeout_s=arguments.request_timeout,
        shutdown_timeout_s=arguments.shutdown_timeout,
        chat_template=arguments.chat_template,
        tool_call_parser=arguments.tool_call_parser,
        reasoning_parser=arguments.reasoning_parser,
        vllm_metric_names=arguments.vllm_metric_names,
    )
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    # A random seed: requests without one give a different text each time.
    options: dict[str, Any] = located_kwargs(arguments) | {"seed": secrets.randbits(63)}
    return asyncio.run(_serve(config, options.get("model"), options, arguments.otlp_traces_endpoint))


async def _serve(config: Any, model_dir: str | None, options: dict[str, Any], traces: str | None) -> int:
    import prometheus_client

    from jaxllm.server.engine.process_client import ProcessClient
    from jaxllm.server.http import run
    from jaxllm.server.served_model import read_model
    from jaxllm.server.server import Server

    if not config.is_loopback and not config.api_keys:
        print(
            f"warning: {config.host} can be reached from other machines, and without --api-key anyone there can use "
            "this server",
            file=sys.stderr,
        )
    tracing = None
    if traces is not None:
        from jaxllm.server.observe.tracing import open_tracing

        tracing = open_tracing(traces, config.served_model_names[0])
    prometheus_client.disable_created_metrics()  # they are a third of the metrics, and unused
    listener = run.bind(config)
    model = read_model(config, model_dir, created=int(time.time()))
    return await run.serve(Server(config, ProcessClient(options), model, tracing=tracing), listener)
