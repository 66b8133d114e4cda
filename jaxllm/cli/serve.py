"""`python -m jaxllm.serve`: OpenAI's API over HTTP."""

import argparse
import asyncio
import gc
import logging
import secrets
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from jaxllm.cli.cluster import cluster_of
from jaxllm.cli.common import located_kwargs, run_command
from jaxllm.cli.config_file import parse_with_config
from jaxllm.cli.environment import logging_level
from jaxllm.cli.parser import CommandParser
from jaxllm.cli.serve_options import make_parser, server_config
from jaxllm.cli.vllm_flags import log_notes
from jaxllm.interrupts import asyncios_interrupts
from jaxllm.stderr import say


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 after SIGTERM or Ctrl-C, 1 if the engine died, 2 for bad options or models."""
    arguments = parse_with_config(_parser(), argv)
    return run_command(lambda: _run(arguments), prints=False)


def _parser() -> CommandParser:
    return make_parser()


def _run(arguments: argparse.Namespace) -> int:
    config = server_config(arguments)
    logging.basicConfig(level=logging_level(), format="%(levelname)s %(name)s: %(message)s")
    log_notes(arguments)
    # A random seed: requests without one give a different text each time.
    seed = secrets.randbits(63) if arguments.seed is None else arguments.seed
    options: dict[str, Any] = located_kwargs(arguments) | {"seed": seed}
    cluster = cluster_of(arguments)
    if cluster is not None and cluster.num_hosts > 1:
        cluster.secret()  # or says what is wrong with it
        options["cluster"] = cluster.to_dict()
        if not cluster.is_leader:
            from jaxllm.cluster.supervisor import supervise

            return supervise(options)
    with asyncios_interrupts():
        return asyncio.run(_serve(config, options, arguments.otlp_traces_endpoint))


async def _serve(config: Any, options: dict[str, Any], traces: str | None) -> int:
    """`options` are the engine's."""
    import prometheus_client

    from jaxllm.server.engine.process_client import ProcessClient
    from jaxllm.server.engine.restarting_client import RestartingClient
    from jaxllm.server.http import run
    from jaxllm.server.served_model import read_model
    from jaxllm.server.server import Server

    if not config.is_loopback and not config.api_keys:
        say(
            f"warning: {config.host} can be reached from other machines, and without --api-key anyone there can use "
            "this server"
        )
    tracing = None
    if traces is not None:
        from jaxllm.server.observe.tracing import open_tracing

        tracing = open_tracing(traces, config.served_model_names[0])
    prometheus_client.disable_created_metrics()  # they are a third of the metrics, and unused
    listener = run.bind(config)
    model = read_model(config, options.get("model"), options.get("tokenizer"), created=int(time.time()))
    client = RestartingClient(partial(ProcessClient, options)) if "cluster" in options else ProcessClient(options)
    gc.freeze()  # as the engine's process does
    return await run.serve(Server(config, client, model, tracing=tracing), listener)
