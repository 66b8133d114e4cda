"""Systems and devices that are not there: one line says what is missing. Each in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CPU = {"JAX_PLATFORMS": "cpu"}


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT, env=kept | environment
    )


def test_windows_is_refused_in_a_line_that_names_wsl2():
    done = run("-c", "import sys; sys.platform = 'win32'; import jaxllm")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        "ImportError: jaxllm runs on Linux and macOS. On Windows use it in WSL2"
    )


@pytest.mark.parametrize(("platform", "extra"), [("cuda", "jaxllm[cuda12]"), ("tpu", "jaxllm[tpu]"), ("abacus", None)])
def test_a_platform_that_jax_has_not(platform, extra):
    """Of the extras' plugins none is installed where tests run on a CPU."""
    code = """
from jaxllm import LLM
from jaxllm.errors import DeviceError
try:
    LLM()
except DeviceError as error:
    print(error)
"""
    in_python, command = (
        run(*arguments, JAX_PLATFORMS=platform) for arguments in (["-c", code], ["-m", "jaxllm.generate", "x"])
    )
    text = in_python.stdout.strip()
    assert text.startswith(f"JAX can't use the platform '{platform}', which JAX_PLATFORMS or jax.config asks for: ")
    assert (f"pip install '{extra}'" if extra else "not in the list of known backends") in text
    assert "\n" not in text
    assert (command.returncode, command.stderr) == (2, f"error: {text}\n")


def test_a_cache_that_can_not_be_made_is_said_in_a_line():
    done = run(
        "-m", "jaxllm.generate", "def f(", "--max-tokens", "2", "--quiet", JAX_COMPILATION_CACHE_DIR="/proc/x", **CPU
    )
    assert done.returncode == 0 and done.stdout.startswith("def f(")
    (line,) = [line for line in done.stderr.splitlines() if "kernels" not in line]  # which may not be built
    assert "compilation cache" in line and "'/proc/x'" in line


@pytest.mark.slow
def test_missing_kernels_are_said_once():
    code = """
from pathlib import Path
from jaxllm.pallas_kernels import native
native._library = lambda: Path("/nowhere")
from jaxllm import LLM, SamplingParams
for _ in range(2):
    with LLM(max_model_len=64, max_num_seqs=2, max_num_batched_tokens=8) as llm:
        llm.generate("def f(", SamplingParams(max_tokens=2), use_tqdm=False)
"""
    done = run("-c", code, **CPU)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "compiling:" not in line]
    assert "C++ kernels for CPUs are not built" in line and "about a fifth slower" in line
    assert "python -m jaxllm.pallas_kernels.native.build" in line


def test_wrong_types_are_called_by_their_names():
    """Without the checks of types that run in tests."""
    code = """
from jaxllm import LLM, SamplingParams, StructuredOutputs
for options in ({"mesh": 4}, {"mesh": ["tensor"]}, {"model": 5}, {"model": object()}, {"tokenizer": 42},
                {"tensor_parallel_size": "2"}, {"num_blocks": "8"}):
    try:
        LLM(**options)
    except (ValueError, TypeError) as error:
        print(error)
"""
    found = run("-c", code, **CPU).stdout.splitlines()
    wanted = (
        "mesh=4 is an int; give a string, as in 'tensor=4'",
        "mesh=['tensor'] is a list; give a string",
        "model is an int; give a directory",
        "model is an object; give a directory",
        "an int is not a tokenizer; pass a model directory",
        "tensor_parallel_size='2' must be an integer",
        "num_blocks='8' must be an integer",
    )
    assert len(found) == len(wanted) and all(map(str.startswith, found, wanted)), found
