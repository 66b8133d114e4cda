"""Requests that schemathesis makes up from /openapi.json, on every route that it names. Most are accepted, so that not
only the checks of the fields are tried, and no route answers with a 5xx."""

import re
from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from jsonschema import Draft202012Validator
from referencing import Registry, Resource

from tests.fake_server import FakeClient, running
from tests.server.sound_requests import fit, with_hints

schemathesis = pytest.importorskip("schemathesis")
from schemathesis.checks import not_a_server_error  # noqa: E402 - it may not be there
from schemathesis.generation import GenerationMode  # noqa: E402
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance  # noqa: E402

CHECKS = [not_a_server_error, content_type_conformance, response_schema_conformance]
LEAKS = re.compile(r"0x[0-9a-f]{6,}|Traceback|\.py\b")


@pytest.fixture(scope="module")
def web():
    with running(FakeClient(), tool_call_parser="hermes") as web:
        yield web
        assert web.server.limit.num_admitted == 0 and not web.client.running


@pytest.fixture(scope="module")
def document(web):
    return web.send("GET", "/openapi.json").json


def whole(value):
    """JSON Schema has no integers apart from numbers, so that it makes up 5.0 for 5."""
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    if isinstance(value, dict):
        return {name: whole(one) for name, one in value.items()}
    return [whole(one) for one in value] if isinstance(value, list) else value


def answers(web, operation, num_cases: int, mode, change, checks) -> list:
    """What the server says to cases of the operation, changed by `change`; each must pass the checks."""
    found = []

    @settings(
        max_examples=num_cases,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case):
        case.body = change(case.body)
        answer = case.call_and_validate(base_url=web.url, checks=checks, timeout=60)
        assert not LEAKS.search(answer.text)
        found.append(answer)

    send()
    return found


def operations(document) -> list:
    return [found.ok() for found in schemathesis.openapi.from_dict(document).get_all_operations()]


@pytest.mark.parametrize("num_cases", [25, pytest.param(200, marks=pytest.mark.slow)])
def test_most_sound_requests_are_accepted(web, document, num_cases):
    """At least half of those of every route, and all of them are sound by the document that is served."""
    registry = Registry().with_resource("urn:api", Resource.opaque(document))
    shares = {}
    for operation in operations(with_hints(document)):
        path = operation.path.replace("/", "~1")
        schema = f"urn:api#/paths/{path}/{operation.method}/requestBody/content/application~1json/schema"

        def sound(body, schema=schema):
            if not isinstance(body, dict):
                return body
            body = fit(whole(body))
            Draft202012Validator({"$ref": schema}, registry=registry).validate(body)
            return body

        found = answers(web, operation, num_cases, GenerationMode.POSITIVE, sound, CHECKS)
        counts = Counter(answer.status_code for answer in found)
        assert set(counts) <= {200, 400}, (operation.label, counts)
        for answer in found:
            if answer.headers["content-type"][0].startswith("text/event-stream"):
                assert answer.text.endswith("\n\n") and '"error":{' not in answer.text
        shares[operation.label] = counts[200] / len(found)
    assert set(shares) == {
        f"{method.upper()} {path}" for path, methods in document["paths"].items() for method in methods
    }
    assert min(shares.values()) >= 0.5, shares


@pytest.mark.parametrize("num_cases", [10, pytest.param(80, marks=pytest.mark.slow)])
def test_unsound_requests_are_refused(web, document, num_cases):
    for operation in operations(document):
        if operation.body:
            found = answers(web, operation, num_cases, GenerationMode.NEGATIVE, lambda body: body, CHECKS)
            counts = Counter(answer.status_code for answer in found)
            assert set(counts) <= {200, 400, 404, 405, 413, 415, 504}, (operation.label, counts)
