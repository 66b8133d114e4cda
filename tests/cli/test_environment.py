"""API keys, and what is said of vLLM's environment variables."""

import logging
import os

import pytest

from jaxllm.cli import serve
from jaxllm.cli.common import run_command
from jaxllm.cli.environment import (
    COUNTERPARTS,
    KEY_VARIABLES,
    USED,
    api_keys,
    keep_alive_timeout_s,
    logging_level,
    unused_note,
)
from jaxllm.cli.serve_options import make_parser, server_config


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in list(os.environ):
        if name.startswith("VLLM_") or name in (*KEY_VARIABLES, "JAXLLM_LOGGING_LEVEL"):
            monkeypatch.delenv(name)


@pytest.mark.parametrize("name", KEY_VARIABLES)
def test_a_key_of_the_environment_closes_the_server(monkeypatch, name):
    monkeypatch.setenv(name, "k")
    assert api_keys(None) == ("k",) and api_keys(["given"]) == ("given",)
    for empty in ("", "  "):
        monkeypatch.setenv(name, empty)
        with pytest.raises(ValueError, match=f"{name} is empty, which would leave the server open"):
            api_keys(None)


def test_two_keys_of_the_environment_are_one(monkeypatch):
    assert api_keys(None) == ()
    for name in KEY_VARIABLES:
        monkeypatch.setenv(name, "k")
    assert api_keys(None) == ("k",)
    monkeypatch.setenv("VLLM_API_KEY", "other")
    with pytest.raises(ValueError, match="JAXLLM_API_KEY and VLLM_API_KEY are both set, and differ"):
        api_keys(None)


def test_the_server_takes_vllms_key(monkeypatch):
    served = []

    async def fake(config, options, traces):
        served.append(config.api_keys)
        return 0

    monkeypatch.setattr(serve, "_serve", fake)
    monkeypatch.setenv("VLLM_API_KEY", "k")
    assert serve.main([]) == 0 and serve.main(["--api-key", "a", "--api-key", "b"]) == 0
    assert served == [("k",), ("a", "b")]
    monkeypatch.setenv("VLLM_API_KEY", "")
    assert serve.main([]) == 2 and len(served) == 2


def test_how_long_idle_connections_stay(monkeypatch):
    assert keep_alive_timeout_s(None) == 5 and keep_alive_timeout_s(75) == 75
    monkeypatch.setenv("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "65")
    assert keep_alive_timeout_s(None) == 65 and keep_alive_timeout_s(0) == 0
    monkeypatch.setenv("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "long")
    with pytest.raises(ValueError, match="VLLM_HTTP_TIMEOUT_KEEP_ALIVE='long' must be a whole number of seconds"):
        keep_alive_timeout_s(None)
    assert server_config(make_parser().parse_args(["--keep-alive-timeout", "9"])).keep_alive_timeout_s == 9


def test_the_logging_level(monkeypatch):
    assert logging_level() == logging.INFO
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "debug")
    assert logging_level() == logging.DEBUG
    monkeypatch.setenv("JAXLLM_LOGGING_LEVEL", "ERROR")
    assert logging_level() == logging.ERROR
    monkeypatch.setenv("JAXLLM_LOGGING_LEVEL", "LOUD")
    with pytest.raises(ValueError, match="JAXLLM_LOGGING_LEVEL='LOUD' must be DEBUG, INFO"):
        logging_level()


def test_what_is_not_used_is_named_once(monkeypatch, capsys):
    for name in USED:
        monkeypatch.setenv(name, "INFO")
    for name in ("VLLM_SERVICE_HOST", "VLLM_SERVICE_PORT_HTTP", "VLLM_PORT_80_TCP_ADDR", "VLLM_PORT"):
        monkeypatch.setenv(name, "tcp://10.0.0.1:80")  # as Kubernetes does for a service called vllm
    assert unused_note() is None
    monkeypatch.setenv("VLLM_USE_V1", "1")
    monkeypatch.setenv("VLLM_CACHE_ROOT", "/x")
    assert run_command(lambda: 0) == 0
    assert capsys.readouterr() == (
        "",
        "note: these variables are vLLM's, and not used: VLLM_CACHE_ROOT (set JAX_COMPILATION_CACHE_DIR, or "
        "XDG_CACHE_HOME), VLLM_USE_V1 (has no meaning here)\n",
    )
    assert not USED & set(COUNTERPARTS)
