"""`python -m jaxllm.generate --input`: what a line may hold, what comes out, and what is wrong with a broken one."""

import json
import re

import pytest

from jaxllm.cli import generate
from jaxllm.cli.jsonl import requests as lines_module
from tests.fake_llm import Folder, install, pipe, stdin


@pytest.fixture
def llm(monkeypatch):
    return install(monkeypatch)


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path)


def test_results_are_written_as_they_finish_and_name_their_line(llm, folder, capsys):
    folder.write("a", {"prompt": "é", "id": "x", "n": 2}, b"", {"prompt_token_ids": [5], "custom_id": 7}, b"  ")
    assert folder.run() == 0
    results = folder.results()
    assert [result["line"] for result in results] == [2, 1, 4], "the later of two finishes first"
    digests = [result.pop("digest") for result in results]
    assert len(set(digests)) == 3 and all(re.fullmatch("[0-9a-f]{16}", digest) for digest in digests)
    completion = {"finish_reason": "stop", "stop_reason": None, "num_tokens": 1}
    numbers = {"num_prompt_tokens": 3, "num_cached_tokens": 1, "error": None}
    assert results[1] == {"line": 1, "prompt": "a", "outputs": [{"index": 0, "text": "A", **completion}], **numbers}
    assert (results[0]["id"], results[0]["prompt"]) == ("x", "é")
    assert [(c["index"], c["text"]) for c in results[0]["outputs"]] == [(0, "É"), (1, "É")]
    assert (results[2]["id"], results[2]["prompt_token_ids"]) == (7, [5])
    assert re.fullmatch(r"\[3 requests, 8 tokens, [\d.]+ tokens/s\]\n", capsys.readouterr().err)
    assert not llm.made.is_open


def test_a_lines_own_parameters_come_before_the_command_lines(llm, folder):
    folder.write("a", {"prompt": "b", "temperature": 0.5, "stop": "x", "seed": None})
    assert folder.run("--temperature", "0.1", "--seed", "4", "--top-k", "2") == 0
    a, b = llm.made.params["a"], llm.made.params["b"]
    assert (a.temperature, a.seed, a.top_k, a.max_tokens, a.stops) == (0.1, 4, 2, 128, ())
    assert (b.temperature, b.seed, b.top_k, b.max_tokens, b.stops) == (0.5, None, 2, 128, ("x",))


def test_token_ids_are_there_if_wanted(llm, folder):
    folder.write("ab")
    assert folder.run("--token-ids", "--quiet") == 0
    (result,) = folder.results()
    assert (result["prompt_token_ids"], result["outputs"][0]["token_ids"]) == ([1, 2, 3], [65, 66])


def test_conversations(llm, folder):
    hello, named = [{"role": "user", "content": "Hi"}], [{"role": "system", "content": "S"}]
    tools = [{"name": "f"}]
    asked = {"messages": hello, "tools": tools, "id": 1}
    folder.write(asked, "say", {"messages": named + hello}, {"prompt_token_ids": [3]})
    assert folder.run("--chat", "--system", "Be kind.", "--chat-template", "vicuna") == 0
    kind = {"role": "system", "content": "Be kind."}
    prompts = list(llm.made.params)
    assert prompts[1] == f"{[kind, *hello]}{ {'tools': tools, 'chat_template': 'vicuna'} }"
    assert prompts[0] == f"{[kind, {'role': 'user', 'content': 'say'}]}{ {'chat_template': 'vicuna'} }"
    assert prompts[3] == f"{named + hello}{ {'chat_template': 'vicuna'} }" and prompts[2] == "ids"
    first = {result["line"]: result for result in folder.results()}[1]
    assert (first["id"], first["messages"]) == (1, hello) and "prompt" not in first


BROKEN = {
    b"{": r"it is not JSON \(Expecting property name enclosed in double quotes at column 2\)",
    b'"a" "b"': r"it is not JSON \(Extra data at column 5\)",
    b"\xff": r"it is not UTF-8 text \(invalid start byte at byte 0\)",
    b"null": "it holds null, not a string or an object",
    b"3": "it holds an int, not a string or an object",
    b'{"prompt": NaN}': "it holds NaN, which is not JSON",
    b'{"prompt": "a", "x": 1e999}': "not JSON compliant",
    b'"\\ud800"': "half of a surrogate pair",
    b"[" * 100_000: "it is nested too deeply|maximum recursion",
    b"{}": "it must have one of prompt, prompt_token_ids, messages; it has none",
    b'{"prompt": "a", "messages": []}': "it has prompt and messages",
    b'{"prompt": "a", "temprature": 1, "model": "x"}': "unknown fields: 'model', 'temprature'",
    b'{"prompt": "a", "output_kind": 1}': "unknown fields: 'output_kind'",
    b'{"prompt": ["a"]}': "prompt is a list, not a string",
    b'{"prompt": "a", "top_p": 1.5}': r"top_p=1.5 must be a finite number in \[0, 1\]",
    b'{"prompt": "a", "max_tokens": 2, "min_tokens": 3}': "min_tokens=3 is more than max_tokens=2",
    b'{"prompt_token_ids": [1, true]}': "prompt_token_ids must be a list of integers",
    b'{"prompt": "a", "id": []}': "id must be one string or integer",
    b'{"prompt": "a", "id": 1, "custom_id": 1}': "id and custom_id must be one",
    b'{"prompt": "a", "tools": []}': "tools are for messages, or --chat",
    b'{"messages": []}': "a conversation is a list of at least one message",
    b'{"messages": [{"role": "user", "content": [{"type": "image"}]}]}': "only text is supported",
    b'{"messages": [{"role": "user", "content": "a"}], "tools": [1]}': "tools must be a list",
    b'{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"tools": 1}}': "which chat itself sets",
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_line_is_told_before_the_model_is_loaded(llm, folder, capsys, broken):
    folder.write("a", broken, b"", {"prompt": "a", "n": 0})
    assert folder.run() == 2
    told = capsys.readouterr().err.splitlines()
    assert re.fullmatch(f".*in.jsonl, line 2: .*({BROKEN[broken]}).*", told[0])
    assert re.fullmatch(r".*in.jsonl, line 4: n=0 must be an integer in \[1, 128\]", told[1])
    assert told[2].startswith("error: 2 of 3 lines can't be run, so nothing was.") and "--skip-invalid" in told[2]
    assert llm.made is None and folder.output.read_bytes() == b""


def test_of_many_broken_lines_some_are_shown_and_all_are_counted(llm, folder, capsys):
    folder.write(*[b"{"] * 30)
    assert folder.run() == 2
    told = capsys.readouterr().err
    assert told.count("not JSON") == 20 and "... and 10 more lines" in told and "30 of 30 lines" in told


def test_a_line_that_is_too_long(llm, folder, monkeypatch):
    monkeypatch.setattr(lines_module, "MAX_LINE_BYTES", 100)
    folder.write("a", {"prompt": "b" * 1000}, "c" * 97)
    assert folder.run("--skip-invalid") == 1
    errors = {result["line"]: result["error"] for result in folder.results()}
    assert errors == {1: None, 2: "it is longer than 100 bytes", 3: None}


def test_broken_lines_are_skipped_on_request(llm, folder, capsys):
    folder.write("a", {"prompt": "b", "id": "bad", "n": 0}, {"prompt": "too long", "id": 5}, "unspeakable", "e")
    assert folder.run("--skip-invalid", "--chat") == 1
    results = {result["line"]: result for result in folder.results()}
    assert sorted(results) == [1, 2, 3, 4, 5]
    assert (results[2]["id"], results[2]["outputs"], results[2]["error"]) == (
        "bad",
        [],
        "n=0 must be an integer in [1, 128]",
    )
    assert results[4]["error"] == "the chat template refuses the conversation"
    assert results[5]["error"] is None
    told = capsys.readouterr().err
    assert "line 2: n=0" in told and "line 4: the chat template" in told and "2 lines not run]" in told
    before = folder.output.read_bytes()
    assert folder.run("--skip-invalid", "--chat", "--resume") == 0, "what could not be run is not tried again"
    assert folder.output.read_bytes() == before


def test_what_the_engine_refuses_ends_the_batch_after_what_runs(llm, folder, capsys):
    folder.write("a", "too long", "c", "d", "e")
    assert folder.run() == 2
    assert folder.texts() == {1: "A"}
    told = capsys.readouterr().err
    assert "in.jsonl, line 2: too many tokens\n" in told
    assert "continue with --resume after correcting the line, or with --skip-invalid\n" in told
    assert folder.run("--resume", "--skip-invalid") == 1
    assert sorted(result["line"] for result in folder.results()) == [1, 2, 3, 4, 5]


def test_from_standard_input_to_standard_output(llm, monkeypatch, capfdbinary):
    pipe(monkeypatch, b'"a"\n{"prompt": "b"}\n"c"\n{\n"d"\n')
    assert generate.main(["--input", "-", "--quiet"]) == 2, "a bad line is seen when its turn comes"
    written = capfdbinary.readouterr()
    assert [json.loads(line)["line"] for line in written.out.splitlines()] == [2, 1, 3]
    assert written.err.decode() == (
        "standard input, line 4: it is not JSON (Expecting property name enclosed in double quotes at column 2)\n"
        "ended early: what has finished is on standard output; correct the line, or with --skip-invalid\n"
    )
    pipe(monkeypatch, b'"a"\n{\n"c"\n')
    assert generate.main(["--input", "-", "--output", "-", "--quiet", "--skip-invalid"]) == 1
    written = capfdbinary.readouterr()
    assert [json.loads(line)["line"] for line in written.out.splitlines()] == [2, 3, 1]


def test_standard_input_that_is_a_file_is_checked_like_one(llm, monkeypatch, capsys):
    stdin(monkeypatch, b'"a"\n{\n')
    assert generate.main(["--input", "-"]) == 2
    assert "1 of 2 lines can't be run, so nothing was" in capsys.readouterr().err and llm.made is None


def test_a_model_that_cannot_chat_is_no_lines_fault(llm, folder, capsys):
    folder.write("a", "b")
    assert folder.run("--chat", "--chat-template", "unspeakable", "--skip-invalid") == 0
    assert folder.run("--chat", "--system", "unspeakable", "--skip-invalid", "--resume") == 2
    folder.output.unlink()
    assert folder.run("--chat", "--system", "unspeakable", "--skip-invalid") == 2
    assert capsys.readouterr().err.endswith("error: the chat template refuses the conversation\n")
    assert folder.results() == [] and not llm.made.is_open


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--output", "x"], "--output is for JSON lines"),
        (["--resume"], "--resume is for JSON lines"),
        (["--skip-invalid"], "--skip-invalid is for JSON lines"),
        (["--input", "x", "a prompt"], "there is a prompt beside --input"),
        (["--input", "x", "--file", "y"], "there is a prompt beside --input"),
        (["--input", "x", "--resume"], "--resume needs the results so far"),
        (["--input", "x", "--top-p", "2"], "^error: top_p=2.0 must be"),
        (["--input", "no/such/file"], "^error: no/such/file does not exist; check the path\n$"),
        (["--input", "."], "^error: \\. is a directory; give a file\n$"),
    ],
)
def test_options_that_do_not_fit(llm, capsys, arguments, message):
    assert generate.main(arguments) == 2
    assert re.search(message, capsys.readouterr().err)
    assert llm.made is None
