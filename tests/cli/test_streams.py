"""Standard output and standard error that are closed, and readers that have gone."""

import os
import subprocess
import sys
import textwrap

import pytest

from jaxllm.cli.common import run_command
from jaxllm.progress import progress_bar
from jaxllm.stderr import say

ENV = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
WITH_FAKE_MODEL = textwrap.dedent("""
    import os, sys, types
    from jaxllm.cli import generate
    from tests.fake_llm import FakeLLM, output

    class LLM(FakeLLM):
        script = [(0, output(" there", finished=True))]

        def __enter__(self):
            os.write(2, b"of a library in C++")
            with open(sys.argv[1], "w") as file:
                file.write(str(file.fileno()))
            return self

    sys.modules["jaxllm.llm"] = types.SimpleNamespace(LLM=LLM)
    generate.setup_compilation_cache = lambda: None
    sys.exit(generate.main(sys.argv[2:]))
""")


def run(program: list[str], closing: str = "") -> subprocess.CompletedProcess:
    command = ["sh", "-c", f'exec "$0" "$@" {closing}', sys.executable, *program]
    return subprocess.run(command, capture_output=True, text=True, env=ENV)


@pytest.mark.parametrize("closing", ["2>&-", "2>&- <&-"])
def test_without_standard_error_the_text_is_written(tmp_path, closing):
    done = run(["-c", WITH_FAKE_MODEL, str(tmp_path / "file"), "hello"], closing)
    assert (done.returncode, done.stdout) == (0, "hello there\n")
    assert int((tmp_path / "file").read_text()) != 2, "where libraries write"


def test_closed_standard_output_is_told_before_anything_is_done(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", None)
    assert run_command(lambda: pytest.fail("ran")) == 2
    written = capsys.readouterr().err
    assert written == (
        "error: standard output is closed, and the results would go there; redirect it, as in >/dev/null\n"
    )


def test_a_command_that_prints_nothing_needs_no_standard_output(tmp_path):
    jsonl = tmp_path / "in.jsonl"
    jsonl.write_text('"hello"\n')
    options = ["--input", str(jsonl), "--output", str(tmp_path / "out.jsonl")]
    done = run(["-c", WITH_FAKE_MODEL, str(tmp_path / "file"), *options], ">&-")
    assert done.returncode == 0, done.stderr
    assert int((tmp_path / "file").read_text()) > 2 and (tmp_path / "out.jsonl").read_text()


def test_what_is_said_without_standard_error_goes_nowhere(monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", None)
        say("a warning")
        with progress_bar(True, 3, "prompts") as bar:
            bar.update(1)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("words", ["--help", "--version", "bench --help"])
def test_readers_of_a_text_may_go(words):
    program = (
        "import sys; from jaxllm.cli.main import main\n"
        "try: code = main(sys.argv[1:])\n"
        "except SystemExit as ended: code = ended.code\n"
        "assert not {'jax', 'numpy'} & set(sys.modules)\n"
        "sys.exit(code)"
    )
    reading, writing = os.pipe()
    os.close(reading)
    try:
        command = [sys.executable, "-c", program, *words.split()]
        done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, env=ENV)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")
