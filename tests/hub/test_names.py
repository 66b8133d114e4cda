import pytest

from jaxllm.errors import ModelNotFoundError
from jaxllm.hub.names import HubName, parse_name, served_names

COMMIT = "0123456789" * 4


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("org/name", HubName(repo="org/name")),
        ("Qwen/Qwen2.5-0.5B_x", HubName(repo="Qwen/Qwen2.5-0.5B_x")),
        ("org/name@v1.0", HubName(repo="org/name", revision="v1.0")),
        ("org/name@refs/pr/3", HubName(repo="org/name", revision="refs/pr/3")),
        (f"org/name@{COMMIT}", HubName(repo="org/name", revision=COMMIT)),
        ("org/name:a.Q4_K_M.gguf", HubName(repo="org/name", file="a.Q4_K_M.gguf")),
        ("org/name@v1:sub/a.GGUF", HubName(repo="org/name", revision="v1", file="sub/a.GGUF")),
    ],
)
def test_names_of_the_hub(text, name):
    assert parse_name(text) == name
    assert str(name) == text
    assert name.is_pinned == (name.revision == COMMIT)


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("https://huggingface.co/org/name", "org/name"),
        ("http:/huggingface.co/org/name/", "org/name"),  # as a path writes it
        ("hf.co/org/name", "org/name"),
        ("https://huggingface.co/org/name/tree/main", "org/name"),
        ("https://huggingface.co/org/name/tree/v1.0?x=1#files", "org/name@v1.0"),
        ("https://huggingface.co/org/name/blob/main/a.Q4.gguf", "org/name:a.Q4.gguf"),
        ("https://huggingface.co/org/name/resolve/v1/sub/a.gguf?download=true", "org/name@v1:sub/a.gguf"),
        ("https://huggingface.co/org/name/blob/main/config.json", "org/name"),
    ],
)
def test_addresses_of_the_hub_are_names(url, name):
    assert parse_name(url) == parse_name(name)
    assert served_names(url) == (name,)


@pytest.mark.parametrize(
    "url", ["https://x.com/org/name", "https://evil.com/hf.co/org/name", "https://hf.co.x/org/name"]
)
def test_other_addresses_are_none(url):
    with pytest.raises(ModelNotFoundError, match="is no model"):
        parse_name(url)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpt2", r"smollm2\. The hub's names have an organisation: https://huggingface.co/models\?search=gpt2 finds"),
        ("llama3.2:1b", r"a name of Ollama's library\. .*search=llama3.2 finds"),
    ],
)
def test_names_of_other_programs(text, message):
    with pytest.raises(ModelNotFoundError, match=message):
        parse_name(text)


def test_paths_come_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org/name").mkdir(parents=True)
    (tmp_path / "smollm2").mkdir()
    for text in ("org/name", "smollm2", "./no", "/no", "~/no", "~nobody/no", "../no", "a/b/c"):
        assert parse_name(text).name == text.rpartition("/")[2]
    assert parse_name("other/name") == HubName(repo="other/name")


def test_the_short_name():
    assert parse_name("smollm2") is None


@pytest.mark.parametrize(
    "text",
    ["", "name", "org/", "org/name@", "org/name:", "org/na me", "org/..", "org/a..b", "org--x/y", "org/name@../x"]
    + ["org/name@-x", "org/name:a.bin", "org/name:a.gguf:b", "https://x/y", "-org/name", "org/name\n", "orgé/name"],
)
def test_what_is_no_name(text):
    with pytest.raises(ModelNotFoundError):
        parse_name(text)


def test_the_error_says_what_is_accepted_and_what_is_near():
    with pytest.raises(ModelNotFoundError, match=r"org/name@revision.*smollm2\. In the cache: Qwen/Qwen3-0.6B"):
        parse_name("qwen3-0.6b", known=["Qwen/Qwen3-0.6B", "org/other"])


def test_a_revision_is_given_once(tmp_path):
    assert parse_name("org/name", "v1") == parse_name("org/name@v1") == parse_name("org/name@v1", "v1")
    for text in ("org/name@v2", "smollm2", str(tmp_path)):
        with pytest.raises(ValueError, match="revision='v1'"):
            parse_name(text, "v1")


def test_names_of_a_served_model(tmp_path):
    assert served_names("org/name@v1") == ("org/name@v1",)
    assert served_names("smollm2") == ("smollm2",)
    (tmp_path / "model").mkdir()
    assert served_names(str(tmp_path / "model")) == ("model", str(tmp_path / "model"))
