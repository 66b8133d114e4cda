"""HTTPS, pages of other origins, and a proxy's path."""

import json
import shutil
import ssl
import subprocess
import urllib.error
import urllib.request

import pytest

from jaxllm.server.config import ServerConfig
from tests.fake_server import running

ORIGIN = "https://example.org"


@pytest.fixture(scope="session")
def certificate(tmp_path_factory):
    """A certificate for localhost with its key, in one file."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make a certificate with")
    file = tmp_path_factory.mktemp("tls") / "server.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-days", "2"]
    key = file.with_name("key.pem")
    subprocess.run([*command, "-keyout", str(key), "-out", str(file)], check=True, capture_output=True)
    file.write_text(file.read_text() + key.read_text())
    return file


def get(url: str, context: ssl.SSLContext):
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
    )  # fmt: skip
    with opener.open(url, timeout=10) as answer:
        return json.load(answer)


def test_https(certificate):
    with running(ssl_certfile=str(certificate)) as web:
        url = f"https://localhost:{web.port}/v1/models"
        models = get(url, ssl.create_default_context(cafile=str(certificate)))
        assert models["data"][0]["id"] == "fake"
        with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
            get(url, ssl.create_default_context())


def test_clients_with_certificates(certificate):
    with running(ssl_certfile=str(certificate), ssl_ca_certs=str(certificate), ssl_cert_reqs=2) as web:
        url, context = f"https://localhost:{web.port}/v1/models", ssl.create_default_context(cafile=str(certificate))
        with pytest.raises(OSError):
            get(url, context)
        context.load_cert_chain(certificate)
        assert get(url, context)["data"]


def test_certificates_that_can_not_be_used(certificate, tmp_path):
    from jaxllm.server.http.run import make_web
    from tests.fake_server import FakeClient, ServedModel, Server, tokenizer

    broken = tmp_path / "broken.pem"
    broken.write_text("no certificate")
    model = ServedModel(("fake",), tokenizer())
    for file in (broken, tmp_path / "missing.pem"):
        server = Server(ServerConfig(ssl_certfile=str(file)), FakeClient(), model)
        with pytest.raises(ValueError, match=f"HTTPS can't be served with {file} .*give a certificate and its key"):
            make_web(server)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ssl_keyfile": "k"}, "need ssl_certfile"),
        ({"ssl_ca_certs": "k"}, "need ssl_certfile"),
        ({"ssl_certfile": "c", "ssl_cert_reqs": 2}, "ssl_cert_reqs=2 needs ssl_ca_certs"),
        ({"root_path": "x"}, "root_path='x' must begin with a slash"),
        ({"root_path": "/x/"}, "root_path='/x/' must begin with a slash, and not end with one"),
        ({"allowed_origins": ("*",), "allow_credentials": True}, "lets every web page act as its visitor"),
    ],
)
def test_settings_that_do_not_fit(settings, message):
    with pytest.raises(ValueError, match=message):
        ServerConfig(**settings)


def preflight(web, origin: str = ORIGIN):
    headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    headers |= {"Access-Control-Request-Headers": "authorization,content-type"}
    return web.send("OPTIONS", "/v1/completions", headers=headers)


def test_no_page_of_another_origin_may_use_it_by_default():
    with running() as web:
        assert preflight(web).status == 405
        answer = web.send("GET", "/v1/models", headers={"Origin": ORIGIN})
        assert "access-control-allow-origin" not in answer.headers


def test_pages_of_named_origins_may_use_it():
    with running(allowed_origins=(ORIGIN,), api_keys=("k",)) as web:
        asked = preflight(web)
        assert asked.status == 200 and asked.headers["access-control-allow-origin"] == ORIGIN
        assert preflight(web, "https://evil.example").status == 400
        refused = web.send("GET", "/v1/models", headers={"Origin": ORIGIN})
        assert refused.status == 401 and refused.headers["access-control-allow-origin"] == ORIGIN
        answer = web.send(
            "GET", "/v1/models", headers={"Origin": ORIGIN, "Authorization": "Bearer k"}
        )  # fmt: skip
        assert answer.status == 200 and answer.headers["access-control-allow-origin"] == ORIGIN
        other = web.send("GET", "/v1/models", headers={"Origin": "https://evil.example", "Authorization": "Bearer k"})
        assert "access-control-allow-origin" not in other.headers


def test_methods_and_headers_of_pages_are_bounded():
    with running(allowed_origins=("*",), allowed_methods=("GET",), allowed_headers=("x-a",)) as web:
        assert preflight(web).status == 400


def test_a_path_that_a_proxy_takes_off():
    """The proxy sends the URL without it; the routes, and what is public, are the same as without a proxy."""
    with running(root_path="/llm", api_keys=("k",)) as web:
        assert web.send("GET", "/health").status == 200 and web.send("GET", "/v1/models").status == 401
        assert web.send("GET", "/v1/models", headers={"Authorization": "Bearer k"}).json["data"]
        for path in ("/llm/health", "//health", "/health/", "/llm", "/llmhealth"):
            assert web.send("GET", path).status == 401, path
        page = web.send("GET", "/", headers={"Accept": "text/html"})
        assert page.status == 401 and b"<html" in page.body


def test_the_page_asks_for_paths_beside_its_own():
    from jaxllm.server.page import page

    assert b"fetch(path.slice(1)" in page().body
