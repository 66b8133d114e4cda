"""Who may ask, and under which name: 401 and 403 over a raw socket."""

import pytest

from jaxllm.server.http import middleware
from tests.fake_server import running
from tests.server.http.test_errors import refused


@pytest.fixture(scope="module")
def web():
    with running() as web:
        yield web


HI = {"role": "user", "content": "Hi"}
KEYS = dict(api_keys=("key-one", "key-two"))
PATHS = [
    "/",
    "/v1/models",
    "/v1/completions",
    "/metrics",
    "/version",
    "/tokenize",
    "//v1/models",
    "/v1/../v1/models",
    "/health/",
    "/health/../v1/models",
    "/%2e/v1/models",
    "/v1%2fmodels",
    "/healthz",
    "/health%00",
    "/ready?x/../..",
    "/nowhere",
    "/Health",
    "/v1/models?path=/health",
    "/;/health",
    "/docs",
]


@pytest.fixture(scope="module")
def locked():
    with running(**KEYS) as web:
        yield web


@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "HEAD", "DELETE"])
def test_without_a_key_everything_is_closed(locked, method):
    for path in PATHS:
        answer = locked.send(method, path, b"{}" if method == "POST" else None)
        if path.startswith("/ready?"):
            assert answer.status in (200, 405)
            continue
        assert answer.status == 401 and answer.headers["www-authenticate"] == "Bearer", path
        if method != "HEAD":
            refused(answer, 401, code="invalid_api_key")


@pytest.mark.parametrize("host", ["a/?x=", "/health", "localhost/health", "@health", "x", "127.0.0.1/../health", ""])
def test_the_host_does_not_open_it(locked, host):
    answer = locked.raw(f"GET /v1/models HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
    assert answer.status in (400, 401)


def test_absolute_urls_do_not_open_it(locked):
    answer = locked.raw(b"GET http://x/health/../v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert answer.status == 401


@pytest.mark.parametrize(
    "value", ["", "Bearer", "Bearer ", "Bearer wrong", "key-one", "Basic key-one", "Bearer key-one x", "Bearer KEY-ONE"]
)
def test_wrong_keys(locked, value):
    refused(locked.send("GET", "/v1/models", headers=[("Authorization", value)]), 401, code="invalid_api_key")


@pytest.mark.parametrize("key", KEYS["api_keys"])
def test_right_keys(locked, key):
    assert locked.send("GET", "/v1/models", headers=[("Authorization", f"Bearer {key}")]).status == 200
    assert locked.send("GET", "/health").status == 200 and locked.send("GET", "/ready").status == 200


def test_every_key_is_compared_by_digest(locked, monkeypatch):
    compared = []
    real = middleware.hmac.compare_digest
    monkeypatch.setattr(middleware.hmac, "compare_digest", lambda a, b: compared.append((a, b)) or real(a, b))
    locked.send("GET", "/v1/models", headers=[("Authorization", "Bearer key-one")])
    assert len(compared) == 2 and all(len(a) == len(b) == 32 for a, b in compared)


def test_two_authorizations_are_none(locked):
    head = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer key-one\r\n"
    answer = locked.raw(head + b"Authorization: Bearer x\r\nConnection: close\r\n\r\n")
    assert answer.status == 401


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "[::2]"])
def test_a_loopback_server_has_loopback_names_only(web, host):
    answer = web.send("GET", "/v1/models", headers=[("Host", host)])
    refused(answer, 403, type="permission_error", code="host_not_allowed")


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:8000", "[::1]:8000", "LOCALHOST:1"])
def test_loopback_names(web, host):
    assert web.send("GET", "/v1/models", headers=[("Host", host)]).status == 200


def test_no_cross_origin_requests(web):
    answer = web.send("OPTIONS", "/v1/completions", headers=[("Origin", "http://evil.example")])
    assert answer.status == 405
    answer = web.complete(headers=None)
    assert not any(name.startswith("access-control") for name in answer.headers)


def test_each_key_has_its_own_part_of_the_prefix_cache(locked):
    def salt(key, **fields):
        body = {"model": "fake", "prompt": "Hi", "max_tokens": 1} | fields
        assert locked.post("/v1/completions", body, headers={"Authorization": f"Bearer {key}"}).status == 200
        return locked.client.seen[-1][1].cache_salt

    salts = [salt(key, **fields) for fields in ({}, {"cache_salt": "a"}) for key in ("key-one", "key-two")]
    assert len(set(salts)) == 4 and all(len(salt) == 64 for salt in salts)
    assert salt("key-one", cache_salt="a") == salts[2]


@pytest.mark.parametrize("settings", [{}, KEYS | {"isolates_keys": False}])
def test_without_isolation_a_request_s_own_salt_counts(settings):
    headers = {"Authorization": "Bearer key-two"}
    with running(**settings) as web:
        for path, more in (("/v1/completions", {"prompt": "Hi"}), ("/v1/chat/completions", {"messages": [HI]})):
            body = {"model": "fake", "max_tokens": 1} | more
            for salt in (None, "mine"):
                assert web.post(path, body | {"cache_salt": salt}, headers=headers).status == 200
                assert web.client.seen[-1][1].cache_salt == salt
        body = {"model": "fake", "prompt": "Hi", "cache_salt": ""}
        refused(web.post("/v1/completions", body, headers=headers), 400, code="invalid_value", param="cache_salt")
