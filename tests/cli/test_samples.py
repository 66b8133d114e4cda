"""What the README shows of the embedded model is what the commands print, and most of what it writes is Python."""

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from jaxllm import LLM
from jaxllm.cli.generate import _parser
from jaxllm.cli.sampling_options import sampling_fields, with_defaults
from jaxllm.sampling_params import SamplingParams, drawing_fields

ROOT = Path(__file__).parents[2]
COMMAND, SHOWN = (
    r"^    \$ (?:python -m jaxllm\.|jaxllm )generate (?P<words>.*)\n",
    r"(?P<text>(?:(?:    (?!\$ ).*)?\n)+)",
)
SAMPLE = re.compile(COMMAND + SHOWN, re.MULTILINE)


def samples() -> dict[str, str]:
    """The arguments of each command that the README shows with its output, and that output."""
    found = {}
    for match in SAMPLE.finditer((ROOT / "README.md").read_text()):
        found[match["words"]] = re.sub(r"^    ", "", match["text"], flags=re.MULTILINE).rstrip("\n")
    return found


def test_the_readme_has_samples_with_the_commands_defaults():
    assert len(samples()) == 2
    for words in samples():
        given = sampling_fields(_parser().parse_args(shlex.split(words)))
        assert set(given) == {"seed"}, "the defaults are its best side, so that no other option is needed"


@pytest.mark.parametrize("words", samples())
def test_a_sample_is_what_the_command_prints(words):
    command = [sys.executable, "-m", "jaxllm", "generate", *shlex.split(words), "--quiet"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip("\n") == samples()[words]


@pytest.fixture(scope="module")
def llm():
    sizes = {"max_num_seqs": 16, "max_num_batched_tokens": 64, "max_model_len": 192, "num_blocks": 128}
    with LLM(**sizes) as llm:
        yield llm


def parses(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def test_most_of_what_it_writes_by_default_parses(llm):
    recommended = drawing_fields(llm.get_default_sampling_params())
    assert recommended == {"temperature": 0.5, "min_p": 0.4, "repetition_penalty": 1.25}
    params = [SamplingParams(**with_defaults({"seed": seed}, recommended)) for seed in range(30)]
    assert params[0].max_tokens == 128
    prompt = "def read_lines(path"
    outputs = llm.generate([prompt] * 30, params, use_tqdm=False)
    assert sum(parses(prompt + output.outputs[0].text) for output in outputs) >= 22  # 25 of 30; without them 15
    question = [{"role": "user", "content": "Write a function that reverses a string."}]
    answers = llm.chat([question] * 10, params[:10], use_tqdm=False)
    assert sum(parses(output.outputs[0].text) for output in answers) >= 8
