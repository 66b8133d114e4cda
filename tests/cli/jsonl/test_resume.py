"""Nothing that a batch has finished is lost: crashes, interrupts, full disks, and going on afterwards."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import textwrap

import pytest

from jaxllm.cli import generate
from jaxllm.cli.jsonl import run as run_module
from jaxllm.errors import ModelFormatError
from tests.fake_llm import Folder, install, pipe


@pytest.fixture
def llm(monkeypatch):
    return install(monkeypatch)


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path)


def test_what_failed_is_told_and_runs_again(llm, folder, capsys):
    folder.write("a", "fail", "c")
    assert folder.run() == 1
    assert "in.jsonl, line 2: it failed\n" in (told := capsys.readouterr().err) and ", 1 failed]" in told
    folder.run("--resume")
    assert list(llm.made.params) == ["fail"]
    assert [result["error"] for result in folder.results()] == ["it failed", None, None, "it failed"]


def test_a_crash_is_resumed_where_it_was(llm, folder, capsys):
    requests = [f"prompt {i}" for i in range(9)]
    folder.write(*requests)
    assert folder.run("--resume") == 0, "there may be nothing to resume"
    whole = folder.output.read_bytes()
    num_lines = 0
    for size in range(0, len(whole), 97):
        folder.output.write_bytes(whole[:size])
        num_lines = whole[:size].count(b"\n")
        assert folder.run("--resume") == 0
        assert folder.texts() == {i + 1: text.upper() for i, text in enumerate(requests)}
        assert folder.output.read_bytes().startswith(whole[:size].rpartition(b"\n")[0])
        assert len(llm.made.params) == 9 - num_lines
        torn = size > 0 and not whole[:size].endswith(b"\n")
        assert ("the last line is incomplete" in capsys.readouterr().err) == torn
    assert num_lines == 8


def test_what_is_complete_loads_no_model(llm, folder, capsys):
    folder.write("a", "b")
    folder.run()
    llm.script = RuntimeError("loaded")
    assert folder.run("--resume") == 0
    assert capsys.readouterr().err.endswith("all 2 lines have their results\n")
    folder.input.write_bytes(b"\n")
    assert generate.main(["--input", str(folder.input)]) == 0


@pytest.mark.parametrize(
    ("requests", "options", "line"),
    [
        (["a", "changed", "c"], [], 2),
        (["a", {"prompt": "b", "id": 1}, "c"], [], 2),
        (["a", {"prompt": "b", "seed": 1}, "c"], [], 2),
        (["a", "b", "c"], ["--temperature", "0.1"], 1),
        (["a", "b", "c"], ["--model", "tests"], 1),
        (["a", "b", "c"], ["--chat"], 1),
        (["a", b"{", "c"], ["--skip-invalid"], 2),
    ],
)
def test_results_of_other_requests_are_not_mixed_in(llm, folder, capsys, requests, options, line):
    folder.write("a", "b", "c")
    folder.run()
    before, llm.made = folder.output.read_bytes(), None
    folder.write(*requests)
    assert folder.run("--resume", *options) == 2
    assert f"line {line}: it is not the request that {folder.output} has the result of" in capsys.readouterr().err
    assert folder.output.read_bytes() == before and llm.made is None


def test_an_input_that_became_shorter(llm, folder, capsys):
    folder.write("a", "b", "c")
    folder.run()
    folder.write("a", "b")
    assert folder.run("--resume") == 2
    assert "has a result of line 3, but" in capsys.readouterr().err


def test_standard_input_that_changed_ends_the_batch(llm, folder, monkeypatch, capsys):
    folder.write("a", "b")
    folder.run()
    for skip in ([], ["--skip-invalid"]):
        pipe(monkeypatch, b'"a"\n"x"\n"c"\n')
        assert generate.main(["--input", "-", "--output", str(folder.output), "--resume", *skip]) == 2
        assert "standard input, line 2: it is not the request" in capsys.readouterr().err
    pipe(monkeypatch, b'"a"\n"b"\n"c"\n')
    assert generate.main(["--input", "-", "--output", str(folder.output), "--resume"]) == 0
    assert folder.texts() == {1: "A", 2: "B", 3: "C"}


@pytest.mark.parametrize("line", [b"hello", b"{}", b'{"line": 0, "digest": "0", "error": null}', b"[" * 9999])
def test_an_output_that_is_not_ours_is_left_alone(llm, folder, capsys, line):
    folder.write("a")
    folder.output.write_bytes(line + b"\n")
    assert folder.run("--resume") == 2
    assert "out.jsonl, line 1, is not a result of this command" in capsys.readouterr().err
    assert folder.run() == 2
    assert "has results already; add --resume to continue, or give another --output" in capsys.readouterr().err
    assert folder.output.read_bytes() == line + b"\n" and llm.made is None


def test_an_output_that_cannot_be_written(llm, folder, tmp_path, capsys):
    folder.write("a")
    missing = "does not exist; check the path"
    for output, message in ((tmp_path, "is a directory; give a file"), (tmp_path / "no/out", missing)):
        folder.output = output
        assert folder.run() == 2
        assert capsys.readouterr().err == f"error: {output} {message}\n"
    folder.output = tmp_path / "locked"
    with folder.output.open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert folder.run() == 2
    assert "is being written by another process" in capsys.readouterr().err
    assert llm.made is None


def test_a_full_disk_tears_no_line(llm, folder, monkeypatch, capsys):
    folder.write("a", "b", "c")
    calls, write = [], os.write

    def fill(fd, data):
        calls.append(bytes(data))
        if len(calls) == 2:
            return write(fd, data[:10])
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data)

    monkeypatch.setattr(os, "write", fill)
    assert folder.run("--quiet") == 2
    assert capsys.readouterr().err == f"error: {folder.output} can't be written, as the disk is full\n"
    assert calls[1].endswith(calls[2]) and folder.texts() == {2: "B"} and not llm.made.is_open
    monkeypatch.undo()
    install(monkeypatch)
    assert folder.run("--resume") == 0
    assert folder.texts() == {1: "A", 2: "B", 3: "C"}


def test_a_device_takes_results_too(llm, folder):
    folder.write("a")
    folder.output = folder.output.with_name("null")
    folder.output.symlink_to("/dev/null")
    assert folder.run() == folder.run() == folder.run("--resume") == 0


@pytest.mark.parametrize(("signal_number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_waits_for_what_has_finished(llm, folder, monkeypatch, capfd, signal_number, code):
    monkeypatch.setattr(os, "kill", lambda pid, _: signal.raise_signal(signal_number))
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    folder.write("a", "b", "interrupt", "d", "e", "f")
    assert folder.run() == code
    assert folder.texts() == {1: "A", 2: "B", 3: "INTERRUPT", 4: "D"}
    told = capfd.readouterr().err
    assert "stopping after this step; interrupt once more to stop at once" in told
    assert f"ended early: what has finished is in {folder.output}; continue with --resume\n" in told
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert not llm.made.is_open
    assert folder.run("--resume") == 0
    assert len(folder.texts()) == 6


def test_a_second_interrupt_is_taken_at_once(llm, folder, capfd):
    folder.write("a", "b", "interrupt", "interrupt", "e")
    assert folder.run() == 130
    assert folder.texts() == {1: "A", 2: "B"}
    assert not llm.made.is_open


def test_an_engine_that_dies_or_cannot_start(llm, folder, capsys):
    folder.write("a", "b", "dead")
    assert folder.run("--quiet") == 2
    assert folder.texts() == {1: "A", 2: "B"} and capsys.readouterr().err == "error: the engine is dead\n"
    llm.script = ModelFormatError("bad model")
    assert folder.run("--resume") == 2
    assert capsys.readouterr().err == "error: bad model\n"


PROGRAM = textwrap.dedent("""
    import sys, time, types
    from jaxllm import generate
    from jaxllm.outputs import CompletionOutput, RequestOutput

    class LLM:
        def __init__(self, seed): pass
        def __enter__(self): return self
        def __exit__(self, *_): print("closed", file=sys.stderr)
        def generate_iter(self, requests):
            for index, (prompt, params) in enumerate(requests):
                time.sleep(0.01)
                done = [CompletionOutput(index=0, text=prompt["prompt"] * 1000, finish_reason="stop")]
                yield [(index, RequestOutput(request_id="", prompt="", prompt_token_ids=[], outputs=done))]

    sys.modules["jaxllm.llm"] = types.SimpleNamespace(LLM=LLM)
    generate.setup_compilation_cache = lambda: None
    sys.exit(generate.main(sys.argv[1:]))
""")


def start(*arguments: str) -> subprocess.Popen:
    command = [sys.executable, "-c", PROGRAM, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_closed_pipe_ends_quietly(folder):
    folder.write(*map(str, range(1000)))
    with start("--input", str(folder.input), "--quiet") as process:
        first = json.loads(process.stdout.readline())
        process.stdout.close()
        assert process.stderr.read() == "closed\n"
    assert process.returncode == 141 and first["line"] == 1


def test_ctrl_c_in_a_process_and_the_rest_later(folder):
    folder.write(*map(str, range(150)))
    with start("--input", str(folder.input), "--output", str(folder.output)) as process:
        while not folder.output.exists() or folder.output.stat().st_size < 20_000:
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        told = process.communicate()[1]
    assert process.returncode == 130 and told.endswith("continue with --resume\n")
    done = folder.texts()
    assert 5 < len(done) < 150 and f"[{len(done)} requests," in told
    with start("--input", str(folder.input), "--output", str(folder.output), "--resume") as process:
        assert f"[{150 - len(done)} requests," in process.communicate()[1]
    assert process.returncode == 0
    assert folder.texts() == {i + 1: str(i) * 1000 for i in range(150)}


def test_progress_is_shown_in_a_terminal_only(llm, folder, monkeypatch, capsys):
    folder.write("a", "b", "c")
    bars = []
    tqdm = run_module.tqdm
    monkeypatch.setattr(run_module, "tqdm", lambda **options: bars.append(options) or tqdm(**options))
    run_module.tqdm.write = tqdm.write
    folder.run("--resume")
    folder.output.write_bytes(folder.output.read_bytes().partition(b"\n")[0] + b"\n")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    folder.run("--resume")
    assert [(bar["total"], bar["initial"], bar["disable"]) for bar in bars] == [(3, 0, None), (3, 1, None)]
    shown = capsys.readouterr().err
    assert "requests: 100%" in shown and "3/3" in shown and "tokens/s, 0 failed" in shown
