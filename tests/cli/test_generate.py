import io
import re
import subprocess
import sys
import textwrap
import time

import pytest

from jaxllm.cli import generate
from jaxllm.cli.common import EXIT_INTERRUPTED, run_command
from jaxllm.errors import JaxLLMError, ModelFormatError, OutOfMemoryError
from tests.fake_llm import Stats, install, output, stdin

SUMMARY = re.compile(r"\[(\d+) tokens?(, [\d.]+ tokens/s)?(, the first after [\d.]+ s)?, KV cache 25\.0% full\]\n")


@pytest.fixture
def llm(monkeypatch):
    fake = install(monkeypatch)
    fake.script = [(0, output(" there", finished=True))]
    return fake


def test_a_completion_follows_its_prompt_and_a_summary_closes(llm, capsys):
    llm.script = [(0, output(" th")), (0, output(" there", finished=True))]
    assert generate.main(["hello"]) == 0
    written = capsys.readouterr()
    assert written.out == "hello there\n"
    assert SUMMARY.fullmatch(written.err)[1] == "6"
    assert not llm.made.is_open and not llm.made.stream_is_open


def test_no_echo_and_quiet_leave_only_the_completion(llm, capsys):
    assert generate.main(["hello", "--no-echo", "--quiet"]) == 0
    written = capsys.readouterr()
    assert (written.out, written.err) == (" there\n", "")


class Recorder(io.StringIO):
    """Remembers what was visible at each flush."""

    def __init__(self, is_terminal: bool = False):
        super().__init__()
        self.flushed, self._is_terminal = [], is_terminal

    def flush(self):
        self.flushed.append(self.getvalue())

    def isatty(self):
        return self._is_terminal


def test_text_is_shown_as_it_arrives(llm, monkeypatch):
    llm.script = [(0, output("a")), (0, output("ab")), (0, output("abc", finished=True))]
    monkeypatch.setattr(sys, "stdout", out := Recorder())
    generate.main(["> "])
    assert list(dict.fromkeys(out.flushed)) == ["> ", "> a", "> ab", "> abc\n"]


def test_later_completions_wait_for_their_turn(llm, monkeypatch):
    llm.script = [
        (1, output("C", "D", finished=(False, True))),
        (0, output("A", "B")),
        (0, output("A", "Bb", finished=(False, True))),
        (0, output("Aa", "Bb", finished=True)),
        (1, output("Cc", "D", finished=True)),
    ]
    monkeypatch.setattr(sys, "stdout", out := Recorder())
    assert generate.main(["p", "q", "--n", "2", "--quiet"]) == 0
    assert out.getvalue() == (
        "--- prompt 1/2, sample 1/2 ---\npAa\n"
        "--- prompt 1/2, sample 2/2 ---\npBb\n"
        "--- prompt 2/2, sample 1/2 ---\nqCc\n"
        "--- prompt 2/2, sample 2/2 ---\nqD\n"
    )
    assert "--- prompt 1/2, sample 1/2 ---\npA" in out.flushed, "the first is live"
    assert any(text.endswith("\nqC") for text in out.flushed), "what had arrived is shown when its turn comes"


@pytest.mark.parametrize(("no_color", "prompt"), [("", "\x1b[2mhi\x1b[0m"), ("1", "hi")])
def test_a_terminal_dims_the_prompt_and_obeys_no_escape_of_the_models(llm, monkeypatch, no_color, prompt):
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setattr(sys, "stdout", out := Recorder(is_terminal=True))
    llm.script = [(0, output("\x1b[31m\ta\n", finished=True))]
    generate.main(["hi"])
    assert out.getvalue() == f"{prompt}\ufffd[31m\ta\n\n"


def test_a_failed_request_is_told_and_exits_1(llm, capsys):
    llm.script = [(1, output("b", finished=True)), (0, output("", finished=True, error="decoding failed"))]
    assert generate.main(["p", "q"]) == 1
    assert capsys.readouterr().err.endswith("error: prompt 1 failed: decoding failed\n")


def test_preemptions_are_told():
    meter = generate.Meter()
    assert meter.summary(Stats(num_preemptions=7)) == "[0 tokens, 7 preemptions, KV cache 25.0% full]"
    assert ", 1 preemption, KV" in meter.summary(Stats(num_preemptions=1))


def test_the_closing_line_fits_a_narrow_terminal(monkeypatch):
    times = iter([0.0, 123.456, 789.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(times))
    meter = generate.Meter()
    meter.update(0, output("a"))
    assert meter.speed() == "[1 token, the first after 123.46 s]"
    meter.update(0, output("a" * 1_234_567))
    line = meter.summary(Stats(num_preemptions=123_456))
    assert line == "[1234567 tokens, 1855.0 tokens/s, the first after 123.46 s, 123456 preemptions]" and len(line) <= 80


def test_options_reach_the_engine_and_the_request(llm):
    arguments = """
        p --model dir --dtype float32 --mesh tensor=2 --max-model-len 64 --max-num-seqs 4
        --max-num-batched-tokens 8 --block-size 2 --num-blocks 9 --no-prefix-caching
        --gpu-memory-utilization 0.5
        --n 1 --temperature 0.5 --top-k 3 --top-p 0.9 --min-p 0.1 --seed 7 --max-tokens 5 --min-tokens 1
        --stop x --stop yz --stop-token-ids 4 --stop-token-ids 5 --ignore-eos
    """
    generate.main(arguments.split())
    assert llm.made.kwargs.pop("seed") is not None
    assert llm.made.kwargs == {
        "model": "dir",
        "dtype": "float32",
        "mesh": "tensor=2",
        "max_model_len": 64,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 8,
        "block_size": 2,
        "num_blocks": 9,
        "enable_prefix_caching": False,
        "gpu_memory_utilization": 0.5,
    }
    params = llm.made.params
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.5, 3, 0.9, 0.1)
    assert (params.seed, params.max_tokens, params.min_tokens) == (7, 5, 1)
    assert (params.stops, params.stop_token_ids, params.ignore_eos) == (("x", "yz"), [4, 5], True)


def test_options_left_out_are_left_to_the_engine(llm):
    generate.main(["p"])
    first_seed = llm.made.kwargs["seed"]
    assert llm.made.kwargs == {"seed": first_seed}
    assert (llm.made.params.temperature, llm.made.params.max_tokens) == (0.8, 128)
    generate.main(["p"])
    assert llm.made.kwargs["seed"] != first_seed  # another text each time


@pytest.mark.parametrize("arguments", [[], ["--file", "-"]])
def test_standard_input_is_a_prompt(llm, monkeypatch, arguments):
    stdin(monkeypatch, "héllo\nworld\n".encode())
    assert generate.main(arguments) == 0
    assert llm.made.prompts == ["héllo\nworld"]


def test_a_file_is_a_prompt(llm, tmp_path):
    (tmp_path / "prompt").write_text("a\n\n")
    assert generate.main(["--file", str(tmp_path / "prompt")]) == 0
    assert llm.made.prompts == ["a\n"]


def test_arguments_win_over_standard_input(llm, monkeypatch):
    stdin(monkeypatch, b"unread")
    generate.main(["p", "q"])
    assert llm.made.prompts == ["p", "q"]


@pytest.mark.parametrize(
    ("arguments", "data", "message"),
    [
        ([], None, "there is no prompt; give one"),
        ([], b"", "there is no prompt: standard input is empty"),
        ([], b"\xff", "standard input is not UTF-8"),
        (["p", "--file", "f"], None, "give one or the other"),
        (["--file", "nowhere.txt"], None, "nowhere.txt does not exist; check the path"),
        (["p", "--n", "0"], None, "n=0 must be an integer in"),
        (["p", "--temperature", "nan"], None, "temperature=nan must be a finite number"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(llm, monkeypatch, capsys, arguments, data, message):
    stdin(monkeypatch, data or b"", is_terminal=data is None)
    assert generate.main(arguments) == 2
    written = capsys.readouterr()
    assert written.out == ""
    assert re.fullmatch(f"error: .*{message}.*\n", written.err)


@pytest.mark.parametrize(
    "error", [ModelFormatError("bad model"), OutOfMemoryError("bad model"), ValueError("bad model")]
)
def test_an_engine_that_cannot_start_is_one_line_and_exit_2(llm, capsys, error):
    llm.script = error
    assert generate.main(["p"]) == 2
    assert capsys.readouterr() == ("", "error: bad model\n")


def test_a_bug_keeps_its_traceback(llm):
    llm.script = [RuntimeError("bug")]
    with pytest.raises(RuntimeError, match="bug"):
        generate.main(["p"])


def test_an_engine_that_dies_midway_exits_2(llm, capsys):
    llm.script = [(0, output("a")), JaxLLMError("the engine is dead")]
    assert generate.main(["p"]) == 2
    assert capsys.readouterr() == ("pa\n", "error: the engine is dead\n")


def test_ctrl_c_ends_the_line_and_tells_what_was_made(llm, capsys):
    llm.script = [(0, output(" th")), KeyboardInterrupt()]
    assert generate.main(["hello"]) == 130
    written = capsys.readouterr()
    assert written.out == "hello th\n"
    assert SUMMARY.fullmatch(written.err)[1] == "3"
    assert not llm.made.is_open


def test_ctrl_c_while_the_text_is_written_aborts_the_request(llm, monkeypatch):
    llm.script = [(0, output("a")), (0, output("ab"))]

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(generate.Printer, "update", interrupt)
    assert generate.main(["hello"]) == 130
    assert not llm.made.stream_is_open


def test_a_ctrl_c_that_arrives_in_a_finalizer_is_not_lost(llm, monkeypatch, capsys):
    class Finalized:
        def __del__(self):
            raise KeyboardInterrupt

    def load():
        Finalized()
        time.sleep(10)

    monkeypatch.setattr(generate, "setup_compilation_cache", load)
    assert generate.main(["hello"]) == 130
    assert capsys.readouterr() == ("", "")


def test_ctrl_c_before_anything_ran(llm, monkeypatch, capsys):
    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(generate, "setup_compilation_cache", interrupt)
    assert generate.main(["hello"]) == 130
    assert capsys.readouterr() == ("", "")


def test_a_closed_pipe_ends_quietly():
    program = textwrap.dedent("""
        import sys, types
        from jaxllm import generate
        from jaxllm.outputs import CompletionOutput, RequestOutput
        from jaxllm.sampling_params import SamplingParams

        class LLM:
            def __init__(self, seed): pass
            def __enter__(self): return self
            def __exit__(self, *_): print("closed", file=sys.stderr)
            def get_default_sampling_params(self): return SamplingParams()
            def stream(self, prompts, params):
                text = ""
                while True:
                    text += "line\\n"
                    outputs = [CompletionOutput(index=0, text=text)]
                    yield 0, RequestOutput(request_id="0", prompt="", prompt_token_ids=[], outputs=outputs)

        sys.modules["jaxllm.llm"] = types.SimpleNamespace(LLM=LLM)
        generate.setup_compilation_cache = lambda: None
        sys.exit(generate.main(["p"]))
    """)
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "pline\n"
        process.stdout.close()
        assert process.stderr.read() == "closed\n"
    assert process.returncode == 141


def test_help_does_not_wait_for_jax():
    code = (
        "import sys; from jaxllm.generate import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: print(sorted({'jax', 'numpy', 'flax', 'tokenizers'} & set(sys.modules)))"
    )
    written = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert "--max-num-batched-tokens" in written
    assert written.splitlines()[-1] == "[]"


def test_an_interrupted_import_is_an_interrupt():
    def command():
        try:
            try:
                raise KeyboardInterrupt
            except KeyboardInterrupt as interrupt:
                raise ImportError("Encountered an error while initializing the extension.") from interrupt
        except ImportError:
            raise ImportError("Unable to import the library") from None

    def broken():
        raise ImportError("no module named jaxlib")

    assert run_command(command) == EXIT_INTERRUPTED
    with pytest.raises(ImportError, match="jaxlib"):
        run_command(broken)
