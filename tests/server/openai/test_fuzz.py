"""Requests that schemathesis makes up from OpenAI's own specification, sound and unsound: none is answered with a 5xx
or a closed connection, and what is accepted is answered as the specification says."""

import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings

from tests.fake_server import running

schemathesis = pytest.importorskip("schemathesis")
from schemathesis.checks import not_a_server_error  # noqa: E402 - it may not be there
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance  # noqa: E402

schema = schemathesis.openapi.from_path(Path(__file__).parents[2] / "openai_openapi_subset.json")
schema.config.phases.update(phases=["fuzzing"])  # the others try every combination of edges, for many minutes
CHECKS = [not_a_server_error, content_type_conformance, response_schema_conformance]
LEAKS = re.compile(r"0x[0-9a-f]{6,}|Traceback|\.py\b")


@pytest.fixture(scope="module")
def web():
    with running(served_model_names=("fake", "gpt-5.4")) as web:
        yield web
        assert web.server.limit.num_admitted == 0 and not web.client.running


@pytest.mark.slow
@schema.parametrize()
@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_made_up_requests(case, web):
    fields = case.body if isinstance(case.body, dict) else {}
    if fields.get("model"):
        fields["model"] = "fake"  # or nothing would get further than that
    # Events are not in the specification of completions.
    checks = CHECKS[:1] if fields.get("stream") else CHECKS
    answer = case.call_and_validate(base_url=f"{web.url}/v1", checks=checks, timeout=60)
    assert answer.status_code in (200, 400, 404, 405, 413, 415)
    assert not LEAKS.search(answer.text)
    if answer.headers["content-type"][0].startswith("text/event-stream"):
        assert answer.status_code == 200 and answer.text.endswith("\n\n") and '"error":{' not in answer.text
