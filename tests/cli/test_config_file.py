"""`jaxllm serve --config FILE.yaml`."""

import pytest

from jaxllm.cli import serve
from jaxllm.cli.config_file import parse_with_config
from jaxllm.cli.serve_options import server_config


@pytest.fixture
def parse(tmp_path):
    """The arguments of a file's text and of words."""

    def parse(text: str, *words: str):
        file = tmp_path / "config.yaml"
        file.write_text(text)
        return parse_with_config(serve._parser(), ["--config", str(file), *words])

    return parse


TEXT = """
model: org/name
port: 9000
max_model_len: 64
tensor-parallel-size: 2
served-model-name: [a, b]
api-key: [k, l]
allowed-origins: ["https://a"]
override-generation-config: {temperature: 0.5}
trust-remote-code: true
enable-prefix-caching: false
enforce-eager: false
seed: null
"""


def test_the_options_of_a_file(parse):
    found = parse(TEXT)
    assert (found.model, found.port, found.max_model_len, found.tensor_parallel_size) == ("org/name", 9000, 64, 2)
    assert (found.served_model_name, found.api_key) == (["a", "b"], ["k", "l"])
    assert found.allowed_origins == ("https://a",) and found.override_generation_config == {"temperature": 0.5}
    assert found.no_prefix_caching and found.seed is None
    assert [note.split()[0] for note in found.vllm_notes] == ["--trust-remote-code", "--no-enforce-eager"]


def test_who_may_come_and_what_they_may_take(parse, monkeypatch):
    for name in ("JAXLLM_API_KEY", "VLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    config = server_config(parse("allowed-hosts: [a.example, b.example]\nmax-body-memory: 99999999\nport: 0\n"))
    assert config.allowed_hosts == ("a.example", "b.example") and config.max_body_memory_bytes == 99_999_999
    assert config.scheduling_policy is None and config.has_priorities
    config = server_config(parse("port: 0", "--allowed-hosts", "*", "--scheduling-policy", "fcfs"))
    assert config.hosts is None and not config.has_priorities


def test_what_is_typed_comes_first(parse):
    found = parse(TEXT, "other/model", "--port=1", "--max_model_len", "32", "-tp", "4", "--api-key", "m")
    assert (found.model, found.port, found.max_model_len, found.tensor_parallel_size) == ("other/model", 1, 32, 4)
    assert (found.api_key, found.served_model_name) == (["m"], ["a", "b"])
    found = parse("enforce-eager: true\n", "--trust-remote-code")
    assert [note.split()[0] for note in found.vllm_notes] == ["--enforce-eager", "--trust-remote-code"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot: 1", "there is no option --prot; did you mean --port?"),
        ("config: x", "there is no option --config"),
        ("port: high", "--port: 'high' is not an integer"),
        ("enable-lora: true", "--enable-lora is not supported: there are no LoRA adapters yet"),
        ("allow-credentials: maybe", "allow-credentials is 'maybe'; it must be true or false"),
        ("- a", "it holds no names with values"),
        ("a: [", "it is not YAML (while parsing"),
        ("!!python/object/apply:os.system [x]", "it is not YAML (could not determine a constructor"),
    ],
)
def test_what_is_wrong_in_a_file(parse, capsys, text, message):
    with pytest.raises(SystemExit) as ended:
        parse(text)
    assert ended.value.code == 2
    first, usage, _ = capsys.readouterr().err.splitlines()
    assert message in first and usage.startswith("usage: ")


def test_a_file_that_is_not_there(capsys):
    with pytest.raises(SystemExit):
        parse_with_config(serve._parser(), ["--config", "/nowhere.yaml"])
    assert "error: --config /nowhere.yaml: the file can't be read" in capsys.readouterr().err
