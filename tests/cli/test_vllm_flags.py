"""vLLM's flags, commands and environment variables: each is what `docs/from_vllm_serve.md` says. The document is
written anew by `python -m tests.cli.test_vllm_flags`."""

import logging
from pathlib import Path

import pytest

from jaxllm.cli import bench, chat, generate, run_batch, serve
from jaxllm.cli.common import engine_kwargs
from jaxllm.cli.completion import module_of
from jaxllm.cli.environment import COUNTERPARTS, USED
from jaxllm.cli.main import COMMANDS
from jaxllm.cli.serve_options import answer_settings, server_config
from jaxllm.cli.vllm_flags import _value, log_notes
from jaxllm.from_vllm.rules import Hint, Only, Renamed
from jaxllm.from_vllm.serve_flags import FLAGS, SEVERAL, SHORT, SWITCHES

DOCUMENT = Path(__file__).parents[2] / "docs/from_vllm_serve.md"
# flag as typed -> the setting of the server, or the argument of the engine, that it makes
USED_FLAGS = {
    "MODEL": ("model", "MODEL"),
    "--model m": ("model", "m"),
    "--tokenizer dir": ("tokenizer", "dir"),
    "--revision r": ("revision", "r"),
    "--download-dir dir": ("download_dir", "dir"),
    "--dtype bfloat16": ("dtype", "bfloat16"),
    "--max-model-len 64": ("max_model_len", 64),
    "--max_model_len=64": ("max_model_len", 64),
    "--max-num-seqs 4": ("max_num_seqs", 4),
    "--max-num-batched-tokens 64": ("max_num_batched_tokens", 64),
    "--gpu-memory-utilization 0.5": ("gpu_memory_utilization", 0.5),
    "--tensor-parallel-size 2": ("tensor_parallel_size", 2),
    "-tp 2": ("tensor_parallel_size", 2),
    "--block-size 16": ("block_size", 16),
    "--num-gpu-blocks-override 9": ("num_blocks", 9),
    "--swap-space 1": ("swap_space", 1.0),
    "--preemption-mode recompute": ("preemption", "recompute"),
    "--no-enable-prefix-caching": ("enable_prefix_caching", False),
    "--enable-prefix-caching": ("enable_prefix_caching", None),
    "--seed 3": ("seed", 3),
    "--load-format dummy": ("load_format", "dummy"),
    '--hf-overrides {"a":1}': ("hf_overrides", {"a": 1}),
    "--max-logprobs 5": ("max_logprobs", 5),
    "--host h": ("host", "h"),
    "--port 9": ("port", 9),
    "--served-model-name a b": ("served_model_names", ("a", "b")),
    "--api-key k": ("api_keys", ("k",)),
    "--chat-template vicuna": ("chat_template", "vicuna"),
    '--default-chat-template-kwargs {"enable_thinking":false}': (
        "default_chat_template_kwargs",
        {"enable_thinking": False},
    ),
    "--tool-call-parser hermes": ("tool_call_parser", "hermes"),
    "--tool-call-parser llama3_json": ("tool_call_parser", "llama"),
    "--tool-call-parser llama4_pythonic": ("tool_call_parser", "pythonic"),
    "--tool-call-parser qwen3_xml": ("tool_call_parser", "qwen3_coder"),
    "--tool-call-parser glm47": ("tool_call_parser", "glm45"),
    "--tool-call-parser minimax_m2": ("tool_call_parser", "minimax_m2"),
    "--tool-call-parser mistral": ("tool_call_parser", "mistral"),
    "--tool-call-parser deepseek_v31": ("tool_call_parser", "deepseek_v31"),
    "--tool-call-parser openai": ("tool_call_parser", "openai"),
    "--reasoning-parser qwen3": ("reasoning_parser", "think"),
    "--reasoning-parser deepseek_r1": ("reasoning_parser", "think"),
    "--reasoning-parser openai_gptoss": ("reasoning_parser", "openai_gptoss"),
    "--generation-config vllm": ("generation_config", "vllm"),
    '--override-generation-config {"top_k":5}': ("override_generation_config", {"top_k": 5}),
    "--ssl-certfile c --ssl-keyfile k": ("ssl_keyfile", "k"),
    "--ssl-certfile c --ssl-ca-certs a --ssl-cert-reqs 2": ("ssl_cert_reqs", 2),
    "--ssl-certfile c --ssl-ciphers x": ("ssl_ciphers", "x"),
    "--root-path /x": ("root_path", "/x"),
    '--allowed-origins ["https://a","https://b"]': ("allowed_origins", ("https://a", "https://b")),
    "--allowed-origins https://a --allow-credentials": ("allow_credentials", True),
    '--allowed-methods ["GET"]': ("allowed_methods", ("GET",)),
    '--allowed-headers ["X-A"]': ("allowed_headers", ("X-A",)),
    "--uvicorn-log-level debug": ("uvicorn_log_level", "debug"),
    "--h11-max-incomplete-event-size 9": ("max_header_bytes", 9),
    "--scheduling-policy priority": ("scheduling_policy", "priority"),
    "--enable-log-requests": ("logs_requests", True),
    "--no-enable-log-requests": ("logs_requests", False),
    "--shutdown-timeout 5": ("shutdown_timeout_s", 5.0),
    "--otlp-traces-endpoint http://x": ("otlp_traces_endpoint", "http://x"),
}
COMMAND_TABLE = (
    ("vllm serve MODEL", "serve", "listens on 127.0.0.1, not on every address: add `--host 0.0.0.0`, with a key"),
    ("vllm chat --url URL", "chat", "without `--url`, with a model in this process"),
    ("vllm complete --url URL", "complete", "`generate` completes with a model in this process"),
    ("vllm run-batch -i FILE -o FILE --model M", "run-batch", "answers are written as they finish"),
    ("vllm bench", "bench", "its options are its own"),
    ("vllm collect-env", None, "`jaxllm --version`"),
)
VARIABLES = (
    ("VLLM_API_KEY", "used, as is `JAXLLM_API_KEY`; two that differ, and an empty one, are errors"),
    ("VLLM_LOGGING_LEVEL", "used"),
    ("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "used, as is `--keep-alive-timeout`"),
    ("VLLM_NO_USAGE_STATS", "it is so: nothing is sent anywhere"),
    ("VLLM_DO_NOT_TRACK", "it is so: nothing is sent anywhere"),
)


@pytest.fixture(autouse=True)
def no_keys(monkeypatch):
    for name in ("JAXLLM_API_KEY", "VLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("flag", USED_FLAGS)
def test_a_flag_with_a_counterpart_has_its_meaning(flag, monkeypatch):
    seen = {}

    async def fake(config, options, traces):
        seen.update(vars(config), **options, otlp_traces_endpoint=traces)
        return 0

    monkeypatch.setattr(serve, "_serve", fake)
    monkeypatch.setattr(serve, "located_kwargs", engine_kwargs)  # the model's name is none
    assert serve.main(flag.split(" ")) == 0
    name, value = USED_FLAGS[flag]
    assert seen.get(name) == value and type(seen.get(name)) is type(value)


def option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


USED_OPTIONS = {word for flag in USED_FLAGS for word in flag.split(" ") if word.startswith("-")}
ONE_PARSER = serve._parser()


def parsed(*words: str):
    return ONE_PARSER.parse_args([*words])


ACCEPTED = {"chat_template_content_format": "string", "response_role": "assistant", "fingerprint_mode": "none"}


def a_value(name: str, rule: Only) -> str | None:
    """What is accepted of a flag with a value, as it is typed."""
    for text in (ACCEPTED.get(name, "auto"), "1", "0", "main", "true", "raw_logprobs", "{}", "", "None"):
        if rule.accepts(_value(text)):
            return text
    return None


@pytest.mark.parametrize("name", [name for name, rule in FLAGS.items() if isinstance(rule, Hint)])
def test_what_has_no_meaning_is_accepted_with_a_note(name, caplog):
    words = [] if name in SWITCHES else ["7"]
    given = [[option(name), *words], *([[f"--no-{option(name)[2:]}"]] if name in SWITCHES else [])]
    for one in given:
        if option(name) in USED_OPTIONS:
            continue
        with caplog.at_level(logging.INFO):
            log_notes(parsed(*one))
        assert caplog.messages == [f"{one[0]} changes nothing: {FLAGS[name].note}"]
        caplog.clear()


@pytest.mark.parametrize("name", [name for name, rule in FLAGS.items() if isinstance(rule, Only)])
def test_what_is_not_there_is_refused_with_the_reason(name, capsys):
    rule = FLAGS[name]
    if option(name) in USED_OPTIONS:
        return
    if name in SWITCHES:
        on, off = [option(name)], [f"--no-{option(name)[2:]}"]
        fine, wrong = (on, off) if rule.accepts(True) else (off, on)
        assert rule.accepts(True) != rule.accepts(False)
    else:
        value = a_value(name, rule)
        assert value is not None
        fine, wrong = [option(name), value], [option(name), "unlikely"]
    if name not in SEVERAL:
        assert not log_notes(parsed(*fine))
    with pytest.raises(SystemExit) as ended:
        parsed(*wrong)
    error = capsys.readouterr().err.splitlines()[0]
    assert ended.value.code == 2 and error == f"error: {' '.join(wrong)} is not supported: {rule.refusal}"


@pytest.mark.parametrize("name", SHORT)
def test_short_names(name, capsys):
    if not isinstance(FLAGS[name], Only):
        assert log_notes(parsed(SHORT[name], "7")) is None
        return
    words = [SHORT[name], *([] if name in SWITCHES else ["unlikely"])]
    with pytest.raises(SystemExit):
        parsed(*words)
    assert capsys.readouterr().err.splitlines()[0].endswith(FLAGS[name].refusal)


def test_the_tables_fit_each_other():
    assert SWITCHES <= set(FLAGS) and SEVERAL <= set(FLAGS) and set(SHORT) <= set(FLAGS) and not SWITCHES & SEVERAL
    for name, rule in FLAGS.items():
        assert isinstance(rule, Renamed) or option(name) in ONE_PARSER._option_string_actions, name


@pytest.mark.parametrize("parser", [run_batch._parser, chat._parser, generate._parser])
def test_the_engines_flags_are_those_of_every_command(parser, capsys):
    needed = ["-i", "a", "-o", "b"] if parser is run_batch._parser else []
    parser().parse_args([*needed, "--trust-remote-code", "--enforce_eager", "-tp", "2", "--disable-log-requests"])
    with pytest.raises(SystemExit):
        parser().parse_args([*needed, "--enable-lora"])
    assert "there are no LoRA adapters yet" in capsys.readouterr().err
    bench._parser().parse_args(["throughput", "m", "--trust-remote-code"])


def test_a_switch_takes_no_model_for_its_value():
    assert parsed("--trust-remote-code", "m").model == "m"
    assert parsed("--enforce-eager", "--disable-log-stats", "m").model == "m"


def test_settings_of_answers_are_those_of_a_batch_too():
    arguments = run_batch._parser().parse_args(["-i", "a", "-o", "b", "--model", "m", "--generation-config", "vllm"])
    assert answer_settings(arguments) == {
        "served_model_names": ("m",),
        "tool_call_parser": "auto",
        "reasoning_parser": "auto",
        "generation_config": "vllm",
    }
    assert server_config(parsed("m")).generation_config == "auto"


def test_commands():
    for _, command, _ in COMMAND_TABLE:
        assert command is None or (command in COMMANDS and module_of(command))


def test_variables_of_the_document_are_those_of_the_commands():
    assert {name for name, _ in VARIABLES} == {name for name in USED if name.startswith("VLLM_")}


def document() -> str:
    """What the tables above and those of the package say."""
    lines = [
        "# From `vllm serve` to `jaxllm serve`",
        "",
        "Written by `tests/cli/test_vllm_flags.py`, which asserts each line.",
        "",
        "Options take underscores as well as hyphens, and `--option=value`; `--config FILE` reads them from YAML",
        "(`tests/cli/test_config_file.py`). The server listens on this machine only unless `--host` says otherwise.",
        "Its API keys close everything but `/health` and `/ready`, where vLLM's close some paths. Web pages of other",
        "origins may use it only if `--allowed-origins` names them; vLLM allows all. It listens while it loads the",
        "model: `/health` says that it lives, and scripts that wait for vLLM's wait for `/ready` here.",
        "",
        "## Commands",
        "",
        "| vLLM | here | |",
        "|---|---|---|",
        *(f"| `{theirs}` | {f'`jaxllm {ours}`' if ours else ''} | {note} |" for theirs, ours, note in COMMAND_TABLE),
        "",
        "## Flags that mean the same",
        "",
        "| flag | setting |",
        "|---|---|",
        *(f"| `{flag}` | {name} = {value!r} |".replace("|{", "| {") for flag, (name, value) in USED_FLAGS.items()),
        "",
        "## Flags that change nothing",
        "",
        "They are accepted with any value, and the server's log says why.",
        "",
        "| flags | why |",
        "|---|---|",
        *_by_reason(Hint),
        "",
        "## Flags that are refused unless they ask for what is so",
        "",
        "| flags | why, and what to do |",
        "|---|---|",
        *_by_reason(Only),
        "",
        "## Environment variables",
        "",
        "| variable | here |",
        "|---|---|",
        *(f"| `{name}` | {text} |" for name, text in VARIABLES),
        *(f"| `{name}` | not used: {text} |" for name, text in COUNTERPARTS.items()),
        "| other `VLLM_*` | named in one line at the start, as they have no meaning here |",
    ]
    return "\n".join(lines) + "\n"


def _by_reason(kind: type) -> list[str]:
    reasons: dict[str, list[str]] = {}
    for name, rule in FLAGS.items():
        if isinstance(rule, kind) and option(name) not in USED_OPTIONS:
            reasons.setdefault(rule[0] if kind is Hint else rule.refusal, []).append(f"`{option(name)}`")
    return [f"| {', '.join(flags)} | {why} |" for why, flags in reasons.items()]


def test_the_document_says_what_is_tested_here():
    assert DOCUMENT.read_text() == document(), "write it anew: python -m tests.cli.test_vllm_flags"


if __name__ == "__main__":
    DOCUMENT.write_text(document())
