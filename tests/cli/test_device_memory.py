"""The commands let JAX allocate the share of a GPU that the engine may use; a library's user keeps JAX's own."""

import os
import subprocess
import sys

import pytest

from jaxllm.cli import common
from jaxllm.engine.config import MEM_FRACTION_VARIABLES


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    for name in MEM_FRACTION_VARIABLES:
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)


def fractions() -> list[str | None]:
    return [os.environ.get(name) for name in MEM_FRACTION_VARIABLES]


@pytest.mark.parametrize(("given", "fraction"), [(None, "0.92"), (0.5, "0.5"), (1.0, "1")])
def test_the_share_is_set_unless_the_environment_says(given, fraction):
    common.setup_device_memory(given)
    assert fractions() == [fraction, None]
    common.setup_device_memory(0.3)
    assert fractions() == [fraction, None]


def test_the_older_name_stays_alone(monkeypatch):
    monkeypatch.setenv(MEM_FRACTION_VARIABLES[1], "0.6")  # JAX refuses both at once
    common.setup_device_memory(0.9)
    assert fractions() == [None, "0.6"]


@pytest.mark.parametrize("share", [0.0, 1.5])
def test_a_share_that_can_not_be_is_refused(share):
    with pytest.raises(ValueError, match=f"gpu_memory_utilization={share} must be a finite number in"):
        common.setup_device_memory(share)
    assert fractions() == [None, None]


COMMAND = """
import os, sys
sys.stdin.close()
import jaxllm.cli.common as common
from jaxllm.cli import {command}

def stop():
    assert "jax" not in sys.modules, "jax came before its options"
    print(os.environ["XLA_CLIENT_MEM_FRACTION"])
    raise SystemExit

{command}.setup_compilation_cache = stop
{command}.main({arguments})
"""


@pytest.mark.parametrize(
    ("command", "arguments"), [("generate", ["hi"]), ("chat", []), ("bench", ["latency"]), ("bench", ["throughput"])]
)
def test_commands_set_it_before_jax_is_there(command, arguments):
    code = COMMAND.format(command=command, arguments=[*arguments, "--gpu-memory-utilization", "0.8"])
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert run.stdout.split() == ["0.8"], run.stderr
