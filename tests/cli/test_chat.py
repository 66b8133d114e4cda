"""`python -m jaxllm.chat` and `jaxllm COMMAND`, over a model that is none."""

import io
import json
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

from jaxllm.cli import chat, main
from jaxllm.cli.conversation import Conversation
from jaxllm.cli.terminal_input import LineInput
from tests.fake_llm import FakeLLM, output, stdin


class ChattyLLM(FakeLLM):
    """Answers with the number of messages; a token for each character of the conversation."""

    most_tokens = 10_000
    log: list = []
    answer = "answer {}"

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        config = types.SimpleNamespace(max_model_len=self.most_tokens)
        self.engine = types.SimpleNamespace(config=config)
        type(self).log = []

    def chat_prompt(self, messages, **options):
        if options["chat_template"] == "none":
            raise ValueError("the model has no chat template; choose a chat_template")
        text = "|".join(f"{message['role'][0]}:{message['content']}" for message in messages)
        return {"prompt": text, "prompt_token_ids": list(text.encode())}

    def stream(self, prompts, params):
        (prompt,) = prompts
        self.log.append((prompt["prompt"], params))
        text = self.answer.format(len(self.log))
        yield 0, output(text[:3])
        if "interrupt" in prompt["prompt"].rpartition("u:")[2]:
            raise KeyboardInterrupt
        failed = "fail" in prompt["prompt"].rpartition("u:")[2]
        yield 0, output(text, finished=True, error="it broke" if failed else None)


@pytest.fixture
def llm(monkeypatch):
    monkeypatch.setitem(sys.modules, "jaxllm.llm", types.SimpleNamespace(LLM=ChattyLLM))
    monkeypatch.setattr(chat, "setup_compilation_cache", lambda: None)
    return ChattyLLM


def say(monkeypatch, *lines: str) -> None:
    stdin(monkeypatch, "".join(f"{line}\n" for line in lines).encode())


def test_each_line_of_a_pipe_is_a_message(llm, monkeypatch, capsys):
    say(monkeypatch, "Hi", "", "And?")
    assert chat.main(["--system", "Be kind"]) == 0
    assert capsys.readouterr() == ("answer 1\nanswer 2\n", "")
    assert [prompt for prompt, _ in llm.log] == ["s:Be kind|u:Hi", "s:Be kind|u:Hi|a:answer 1|u:And?"]


def test_commands(llm, monkeypatch, capsys, tmp_path):
    file = tmp_path / "talk.json"
    say(monkeypatch, "/system Short", "Hi", "/retry", f"/save {file}", "/reset", "/system", "Anew", "/quit", "unread")
    assert chat.main([]) == 0
    prompts = [prompt for prompt, _ in llm.log]
    assert prompts == ["s:Short|u:Hi", "s:Short|u:Hi", "u:Anew"]
    assert json.loads(file.read_text()) == [
        {"role": "system", "content": "Short"},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "answer 2"},
    ]


def test_sampling_parameters_are_set(llm, monkeypatch, capsys):
    say(monkeypatch, "/set temperature 0.2", "/set top-k 5", "a", "/set temperature", "b", "/set")
    assert chat.main(["--max-tokens", "9"]) == 0
    (_, first), (_, second) = llm.log
    assert (first.temperature, first.top_k, first.max_tokens) == (0.2, 5, 9)
    assert (second.temperature, second.top_k) == (0.8, 5)
    assert "top_k 5\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/nothing", "/nothing is not a command; /help"),
        ("/set n 2", "'n' is not a parameter to set"),
        ("/save", "name a file"),
        ("/set temperature hot", "temperature='hot' must be a number"),
        ("/set temperature 9", "temperature=9"),
        ("/retry", "there is no message yet"),
        ("fail", "the answer failed: it broke"),
        ("/save /nowhere/x.json", "/nowhere/x.json does not exist"),
    ],
)
def test_mistakes_are_told_and_the_conversation_goes_on(llm, monkeypatch, capsys, line, message):
    say(monkeypatch, line, "Hi")
    assert chat.main([]) == 1, "a pipe learns of it"
    written = capsys.readouterr()
    assert message in written.err and written.out.rstrip().rpartition("\n")[2].startswith("answer")


def test_ctrl_c_stops_the_answer_and_keeps_it(llm, monkeypatch, capsys):
    say(monkeypatch, "interrupt", "Go on")
    assert chat.main([]) == 0
    assert capsys.readouterr().out == "ans\nanswer 2\n"
    assert llm.log[1][0] == "u:interrupt|a:ans|u:Go on"


def test_two_ctrl_c_leave(llm, monkeypatch, capsys):
    say(monkeypatch)

    def interrupt(self):
        self.is_terminal = True
        raise KeyboardInterrupt

    monkeypatch.setattr(LineInput, "read", interrupt)
    assert chat.main([]) == 130
    assert "Ctrl-D" in capsys.readouterr().out


def test_help_tells_the_length_of_answers(capsys):
    with pytest.raises(SystemExit):
        chat.main(["--help"])
    assert re.search(r"--max-tokens N\s+maximum number of tokens to generate \(default: 512\)", capsys.readouterr().out)


def test_several_lines(llm, monkeypatch):
    say(monkeypatch, '"""one', "two", 'three""" rest', '"""single"""', '"""open', "end")
    assert chat.main([]) == 0
    assert [prompt.rpartition("u:")[2] for prompt, _ in llm.log] == ["one\ntwo\nthree", "single", "open\nend"]


def test_old_messages_are_forgotten_when_the_context_is_full():
    def render(messages, **_):
        text = "".join(message["content"] for message in messages)
        return {"prompt": text, "prompt_token_ids": list(text.encode())}

    talk = Conversation(render, most_tokens=40, system="s")
    for text in ("a" * 10, "b" * 10, "c" * 10):
        talk.say(text)
        prompt, dropped = talk.prompt()
        talk.answered("!")
    assert dropped == 2 and prompt["prompt"] == "s" + "b" * 10 + "!" + "c" * 10
    talk.say("x" * 50)
    with pytest.raises(ValueError, match="51 tokens, but the model's context is 40"):
        talk.prompt()
    talk.say("y")
    assert talk.prompt()[0]["prompt"] == "sy"


def test_a_model_that_does_not_chat(llm, monkeypatch, capsys):
    say(monkeypatch, "Hi")
    assert chat.main(["--chat-template", "none"]) == 2
    assert "has no chat template" in (error := capsys.readouterr().err) and "jaxllm.generate" in error


def test_options_for_several_answers_are_refused(llm, monkeypatch, capsys):
    assert chat.main(["--n", "2"]) == 2
    assert "--n is not for a conversation" in capsys.readouterr().err


def test_a_terminal_is_greeted_and_protected(llm, monkeypatch, tmp_path):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    stdin(monkeypatch, b"", is_terminal=True)
    monkeypatch.setattr(sys, "stdout", out := Terminal())
    lines = iter(["Hi", "/help"])

    def read(prompt):
        for line in lines:
            return line
        raise EOFError

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr(llm, "answer", "ans\x1b]0;x\x07 {}")
    assert chat.main([]) == 0
    shown = out.getvalue()
    assert shown.startswith("This is the embedded model. /help") and "tokens" in shown and "/retry" in shown
    assert "ans\ufffd]0;x\ufffd 1" in shown and "\x1b]" not in shown
    assert (tmp_path / "jaxllm" / "chat_history").stat().st_mode & 0o777 == 0o600


def test_commands_are_dispatched(monkeypatch):
    seen = []
    monkeypatch.setattr(chat, "main", lambda argv: seen.append(argv) or 7)
    assert main.main(["chat", "--quiet"]) == 7
    assert seen == [["--quiet"]]


@pytest.mark.parametrize("argv", [["--version"], ["-V"], ["version"]])
def test_version(capsys, argv):
    assert main.main(argv) == 0
    assert capsys.readouterr().out.startswith("jaxllm ")


def test_usage(capsys):
    assert main.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in main.COMMANDS)
    assert main.main([]) == 2 and main.main(["fly"]) == 2
    assert "'fly' is not a command" in capsys.readouterr().err


def test_every_command_is_there():
    for name in main.COMMANDS:
        file = Path(main.__file__).with_name(f"{name.replace('-', '_')}.py")
        assert "def main(argv" in file.read_text()


def test_the_console_script_names_itself():
    code = "import sys; sys.argv = ['/bin/jaxllm', 'serve', '--help']; from jaxllm.cli.main import main; main()"
    root = Path(main.__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root)
    assert done.stdout.startswith("usage: jaxllm serve"), done.stderr
