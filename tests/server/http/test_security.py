"""Who may ask, and under which name: 401 and 403 over a raw socket."""

import pytest

from jaxllm.server.config import ServerConfig
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
    answer = locked.send("GET", "/v1/models", headers=[("Authorization", value)])
    message = refused(answer, 401, code="invalid_api_key")
    assert message.startswith("Incorrect API key provided"), "litellm takes it for a bad request otherwise"


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


OTHER_HOSTS = [
    *("evil.example", "evil.example:80", "127.0.0.1.evil.example", "[::2]", "[::1].evil.example", "[::1]evil.example"),
    *("localhost:80@evil.example", "evil@localhost", "localhost:x", "localhost:80:80", "[localhost]", "::1", ""),
]


@pytest.mark.parametrize("host", OTHER_HOSTS)
def test_a_loopback_server_has_loopback_names_only(web, host):
    answer = web.send("GET", "/v1/models", headers=[("Host", host)])
    assert "--allowed-hosts" in refused(answer, 403, type="permission_error", code="host_not_allowed")


@pytest.mark.parametrize(
    ("settings", "host", "status"),
    [
        ({"allowed_hosts": ("llm.example.org",)}, "llm.example.org", 200),
        ({"allowed_hosts": ("LLM.example.org",)}, "llm.EXAMPLE.org:443", 200),
        ({"allowed_hosts": ("llm.example.org",)}, "localhost", 200),
        ({"allowed_hosts": ("llm.example.org",)}, "x.llm.example.org", 403),
        ({"allowed_hosts": ("*",)}, "evil.example", 200),
        ({"allowed_hosts": ("[::2]",)}, "[::2]:80", 200),
        ({"host": "0.0.0.0"}, "evil.example", 200),
        ({"host": "0.0.0.0", "allowed_hosts": ("llm.example.org",)}, "evil.example", 403),
        ({"host": "0.0.0.0", "allowed_hosts": ("llm.example.org",)}, "llm.example.org:8000", 200),
    ],
)
def test_names_that_are_allowed(settings, host, status):
    with running(**settings) as web:
        assert web.send("GET", "/v1/models", headers=[("Host", host)]).status == status
        assert web.send("GET", "/health", headers=[("Host", "evil.example")]).status == 200


@pytest.mark.parametrize("name", ["", "a:80", "http://a", "a/b", "[a"])
def test_names_that_can_be_none(name):
    with pytest.raises(ValueError, match=r"allowed_hosts=.* is no host name; give one like llm\.example\.org"):
        ServerConfig(allowed_hosts=(name,))


@pytest.mark.parametrize(
    ("settings", "may"),
    [
        ({}, True),
        ({"api_keys": ("key-one",)}, True),
        (KEYS, False),
        (KEYS | {"scheduling_policy": "priority"}, True),
        ({"scheduling_policy": "fcfs"}, False),
    ],
)
def test_who_may_have_a_priority(settings, may):
    headers = {"Authorization": "Bearer key-one"}
    with running(**settings) as web:
        for path, more in (("/v1/completions", {"prompt": "Hi"}), ("/v1/chat/completions", {"messages": [HI]})):
            body = {"model": "fake", "max_tokens": 1} | more
            assert web.post(path, body | {"priority": 0}, headers=headers).status == 200
            answer = web.post(path, body | {"priority": -5}, headers=headers)
            if may:
                assert answer.status == 200 and web.client.seen[-1][2] == -5
            else:
                message = refused(answer, 400, code="invalid_value", param="priority")
                assert "priority=-5" in message and "--scheduling-policy priority" in message
    with pytest.raises(ValueError, match="scheduling_policy='lifo' must be fcfs or priority"):
        ServerConfig(scheduling_policy="lifo")


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
