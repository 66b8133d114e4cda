"""`jaxllm complete` and `jaxllm chat --url`: commands that talk to a server which runs."""

import contextlib
import http.server
import io
import socket
import ssl
import sys
import threading

import pytest

from jaxllm.cli import chat, complete
from jaxllm.cli.remote import Remote, RemoteError
from tests.fake_llm import stdin
from tests.fake_server import FakeClient, running
from tests.server.http.test_web_options import certificate  # noqa: F401


@pytest.fixture(scope="module")
def web():
    with running(FakeClient(reply="Hello, world", says={"secret": RuntimeError("inside")})) as web:
        yield web


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # loopback is asked without it
    for name in ("JAXLLM_API_KEY", "VLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def url(web) -> str:
    return f"{web.url}/v1"


def last(web):
    """Token ids as text, and the sampling parameters, of the last request."""
    ids, params, _ = web.client.seen[-1]
    return web.client._decoder.decode(ids, skip_special_tokens=False), params


@pytest.mark.parametrize("words", [["Once"], ["-q", "Once"], ["--quick=Once"]])
def test_a_completion_streams(web, capsys, words):
    assert complete.main([*words, "--url", url(web), "--max-tokens", "5", "--temperature", "1", "--stop", "z"]) == 0
    assert capsys.readouterr() == ("Hello\n", "")
    text, params = last(web)
    assert text.endswith("Once") and (params.max_tokens, params.temperature, params.stops) == (5, 1.0, ("z",))


def test_standard_input_is_one_prompt(web, monkeypatch, capsys):
    stdin(monkeypatch, b"a\nb\n")
    assert complete.main(["--url", url(web)]) == 0
    assert capsys.readouterr().out == "Hello, world\n"
    text, params = last(web)
    assert text.endswith("a\nb") and params.max_tokens == 128


def test_in_a_terminal_prompts_come_one_after_the_other(web, monkeypatch, capsys):
    stdin(monkeypatch, b"", is_terminal=True)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    lines = iter(["one", " ", "two"])

    def read(_):
        if (line := next(lines, None)) is None:
            raise EOFError
        return line

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/none")  # no history
    count = len(web.client.seen)
    assert complete.main(["--url", url(web)]) == 0
    assert len(web.client.seen) == count + 2 and capsys.readouterr().out == "Hello, world\nHello, world\n\n"


def test_a_conversation_with_a_server(web, monkeypatch, capsys):
    stdin(monkeypatch, b"Hi\nAnd?\n")
    assert chat.main(["--url", url(web), "--system", "S", "--temperature", "1", "--model-name", "org/alias"]) == 0
    assert capsys.readouterr() == ("Hello, world\nHello, world\n", "")
    text, params = last(web)
    assert text.index("S") < text.index("Hi") < text.index("Hello, world") < text.index("And?")
    assert (params.temperature, params.max_tokens) == (1.0, 512)
    assert chat.main(["--url", url(web), "-q", "Once"]) == 0
    assert capsys.readouterr().out == "Hello, world\n"


def test_what_the_server_refuses_is_told(web, monkeypatch, capsys):
    assert complete.main(["x", "--url", url(web), "--model-name", "other"]) == 2
    assert f"error: {url(web)} answers 404: the model 'other' does not exist here" in capsys.readouterr().err
    assert complete.main(["secret", "--url", url(web)]) == 2
    assert "error: the server ended the answer: an internal error" in capsys.readouterr().err
    stdin(monkeypatch, b"secret\nHi\n")
    assert chat.main(["--url", url(web)]) == 1
    written = capsys.readouterr()
    assert "the answer failed: the server ended the answer" in written.err and "Hello, world" in written.out
    assert "secret" not in last(web)[0], "a message that failed is not said again"


def test_keys(monkeypatch, capsys):
    with running(api_keys=("k",)) as web:
        assert complete.main(["x", "--url", url(web)]) == 2
        assert "answers 401: Incorrect API key provided" in capsys.readouterr().err
        assert complete.main(["x", "--url", url(web), "--api-key", "k"]) == 0
        monkeypatch.setenv("VLLM_API_KEY", "k")
        assert complete.main(["x", "--url", url(web)]) == 0


def test_nobody_listens(capsys):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        for command in (["x"], []):
            main = complete.main if command else chat.main
            assert main([*command, "--url", f"http://127.0.0.1:{port}/v1"]) == 2
            why = "start one with jaxllm serve, or give another --url"
            assert capsys.readouterr().err == f"error: no server listens at http://127.0.0.1:{port}/v1; {why}\n"


@pytest.mark.parametrize("wrong", ["127.0.0.1:8000", "file:///etc/passwd", "ftp://x/", "http://", "x"])
def test_what_is_no_url(wrong, capsys):
    assert complete.main(["x", "--url", wrong]) == 2
    assert f"error: {wrong!r} is no URL of a server; give one as http://127.0.0.1:8000/v1" in capsys.readouterr().err


def test_another_path_has_no_api(web, capsys):
    assert complete.main(["x", "--url", web.url]) == 2
    said = capsys.readouterr().err
    assert "answers 404" in said and f"; did you mean {web.url}/v1?" in said
    _Other("http://127.0.0.1:9/v1", None, "m")
    with pytest.raises(RemoteError, match="lists no model; give --model-name, and check --url"):
        _Other("http://127.0.0.1:9/v1", None, None)


class _Other(Remote):
    """A server that has no models."""

    def _open(self, path, body=None):
        return contextlib.closing(io.BytesIO(b'{"data": []}'))


def test_options_that_do_not_fit(capsys):
    for main, words, message in (
        (complete.main, ["a", "-q", "b"], "there is a prompt beside --quick"),
        (complete.main, ["a", "--n", "2"], "--n is not for a completion of a server"),
        (chat.main, ["m", "--url", "http://127.0.0.1:9/v1"], "--model: with --url that is the server's"),
        (chat.main, ["--max-num-seqs", "2", "--url", "http://127.0.0.1:9/v1"], "--max-num-seqs: with --url"),
        (chat.main, ["--model-name", "x"], "--model-name and --api-key are for a server; give its --url"),
    ):
        assert main(words) == 2
        assert message in capsys.readouterr().err


def test_no_redirect_takes_the_key_elsewhere(web):
    class Redirects(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(302)
            self.send_header("Location", f"{web.url}/v1/models")
            self.end_headers()

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Redirects) as server:
        threading.Thread(target=server.handle_request).start()
        with pytest.raises(RemoteError, match="answers 302"):
            Remote(f"http://127.0.0.1:{server.server_port}/v1", "k", None)


def test_https(web, certificate, monkeypatch, capsys):  # noqa: F811
    with running(ssl_certfile=str(certificate)) as web:
        assert complete.main(["x", "--url", f"https://localhost:{web.port}/v1"]) == 2
        assert "has a certificate that is not trusted" in capsys.readouterr().err
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert ssl.get_default_verify_paths().cafile == str(certificate)
        assert complete.main(["x", "--url", f"https://localhost:{web.port}/v1"]) == 0
