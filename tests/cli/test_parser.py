"""What all commands make of mistakes, of options spelt otherwise, and of their help."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxllm.cli import bench, chat, generate, models, serve
from jaxllm.cli.completion import module_of
from jaxllm.cli.main import COMMANDS, main
from jaxllm.cli.parser import CommandParser

ROOT = Path(__file__).parents[2]


def refusal(command: str, capsys) -> list[str]:
    """What a command line prints, which is wrong."""
    with pytest.raises(SystemExit) as ended:
        main(command.split())
    assert ended.value.code == 2
    written = capsys.readouterr()
    assert written.out == ""
    return written.err.splitlines()


@pytest.mark.parametrize(
    ("command", "error"),
    [
        ("generate x --max-token 5", "there is no option --max-token; did you mean --max-tokens?"),
        ("generate x --max_token=5", "there is no option --max_token; did you mean --max-tokens?"),
        ("generate x --max-new-tokens 5", "there is no option --max-new-tokens; did you mean --max-tokens?"),
        ("generate x --frobnicate", "there is no option --frobnicate"),
        ("generate x --temperature hot", "--temperature: 'hot' is not a number; give one such as 0.5"),
        ("generate x --n 1.5", "--n: '1.5' is not an integer; give one such as 8"),
        ("generate x --model", "--model: a value is missing"),
        ("generate x --early-stopping 1", "--early-stopping: '1' is not one of true, false, never"),
        ("generate x --logit-bias x", "--logit-bias: 'x' is not a token id and a number, as in 198=-5"),
        ("serve a b", "'b' is one argument too many"),
        ("serve --hf-overrides.a 1", "--hf-overrides.a sets a part of --hf-overrides; give that, as JSON"),
        ("serve a --model b", "the model is given twice, as 'a' and 'b'; give one"),
        ("serve --tool-call-parser hermess", "--tool-call-parser: 'hermess' is not one of auto, hermes, llama, "
         "mistral, qwen3_coder, glm45, minimax_m2, deepseek_v3, deepseek_v31, pythonic, openai, none; did you mean "
         "hermes?"),
        ("bench steps", "COMMAND: 'steps' is not one of throughput, latency, startup, serve"),
        ("bench throughput --seeed 1", "there is no option --seeed; did you mean --seed?"),
        ("models", "something is missing: COMMAND"),
        ("models rm", "something is missing: NAME"),
    ],
)  # fmt: skip
def test_a_mistake_is_three_lines_the_error_first(capsys, command, error):
    first, usage, hint = refusal(command, capsys)
    assert first == f"error: {error}"
    assert usage.startswith("usage: ") and command.split()[0] in usage and len(usage) <= 80
    assert hint.endswith(" --help lists the options") and len(hint) <= 80


@pytest.mark.parametrize("command", [*COMMANDS, "bench throughput", "bench serve", "models ls", "models rm"])
def test_the_usage_is_one_line_that_fits(capsys, command):
    first, usage, _ = refusal(f"{command} --no-such-option", capsys)
    assert first.startswith("error: ") and len(usage) <= 80
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == usage and shown[1] == ""


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_ends_with_examples_that_parse(capsys, command):
    import importlib
    import shlex

    with pytest.raises(SystemExit):
        main([command, "--help"])
    _, _, examples = capsys.readouterr().out.partition("\nexamples:\n")
    lines = [line.strip().removeprefix("jaxllm ") for line in examples.splitlines() if line.startswith("  jaxllm ")]
    assert lines
    for line in lines:
        name, *words = shlex.split(line)
        assert name == command
        importlib.import_module(module_of(name))._parser().parse_args(words)


def test_underscores_and_equals_signs_are_fine():
    spelt = ["--max_model_len", "64", "--gpu_memory_utilization=0.5", "--stop", "a_b", "--stop=--c_d"]
    arguments = generate._parser().parse_args(["p_q", *spelt])
    assert (arguments.max_model_len, arguments.gpu_memory_utilization) == (64, 0.5)
    assert arguments.prompts == ["p_q"] and arguments.stop == ["a_b", "--c_d"]
    arguments = bench._parser().parse_args(["latency", "--input_len", "3", "--max-num_seqs=2"])
    assert (arguments.input_len, arguments.max_num_seqs) == (3, 2)
    assert generate._parser().parse_args(["--", "--max_tokens"]).prompts == ["--max_tokens"]


@pytest.mark.parametrize("parser", [serve._parser, chat._parser])
def test_a_model_is_an_argument_or_an_option(parser):
    for words in (["m"], ["--model", "m"], ["m", "--model", "m"], ["--max-num-seqs", "2", "m"]):
        assert parser().parse_args(words).model == "m"
    assert parser().parse_args([]).model is None
    assert bench._parser().parse_args(["throughput", "m", "--json"]).model == "m"


def test_numbers_are_called_by_their_kind():
    for parser in (generate._parser(), serve._parser(), models._parser()):
        for action in parser._actions:
            if action.type is int and action.choices is None and action.help != "==SUPPRESS==":
                assert action.metavar in ("N", "ID"), action.option_strings


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["run", "llama3"], "; to talk with that model: jaxllm chat llama3"),
        (["org/name"], "; to talk with that model: jaxllm chat org/name"),
        (["smollm2"], "; to talk with that model: jaxllm chat smollm2"),
        (["x.gguf"], "; to talk with that model: jaxllm chat x.gguf"),
        (["generat"], "; did you mean jaxllm generate?"),
        (["run"], ""),
        (["frobnicate"], ""),
    ],
)
def test_what_is_no_command_has_a_likely_one(capsys, words, hint):
    assert main(words) == 2
    first, *rest = capsys.readouterr().err.splitlines()
    assert first == f"error: {words[0]!r} is not a command{hint}" and "usage: jaxllm COMMAND [OPTIONS]" in rest


def test_a_choice_may_be_given_as_a_number():
    parser = CommandParser("x")
    parser.add_argument("--level", type=int, choices=(0, 2))
    assert parser.parse_args(["--level", "2"]).level == 2


CODE = "import sys; from jaxllm.cli.generate import _parser; a = _parser().parse_args(); "
C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def under(code: str, *words: bytes, stdin: bytes = b"") -> subprocess.CompletedProcess:
    command = [os.fsencode(sys.executable), b"-c", code.encode(), *words]
    return subprocess.run(command, env=os.environ | C_LOCALE, cwd=ROOT, capture_output=True, input=stdin, timeout=60)


def test_a_prompt_under_the_c_locale_is_what_was_typed():
    done = under(CODE + "print(ascii([*a.prompts, *a.stop]))", "é😀".encode(), b"--stop", "ü".encode())
    assert done.stdout.decode() == "['\\xe9\\U0001f600', '\\xfc']\n", done.stderr
    done = under(CODE, b"\xff")
    assert done.returncode == 2
    assert done.stderr.startswith(b"error: PROMPT: '\\udcff' is not UTF-8 text; set a locale with UTF-8, as in LC_ALL=")
    code = "from jaxllm.cli.terminal_input import LineInput; print(ascii(LineInput().read()))"
    assert under(code, stdin="é\n".encode()).stdout == b"'\\xe9'\n"
