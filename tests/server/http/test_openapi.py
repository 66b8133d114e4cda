"""GET /openapi.json: the routes that are there, with their requests' fields as the server takes them."""

import jsonschema
import msgspec
import pytest
from jsonschema import Draft202012Validator
from referencing import Registry, Resource
from starlette.routing import Route

from jaxllm.server.http import app as app_module
from jaxllm.server.http.errors import internal, invalid
from jaxllm.server.openai.decoding import refused_fields
from jaxllm.server.openai.schemas import ChatRequest, CompletionRequest
from tests.fake_server import running


@pytest.fixture(scope="module")
def web():
    with running() as web:
        yield web


@pytest.fixture(scope="module")
def document(web):
    answer = web.send("GET", "/openapi.json")
    assert answer.status == 200 and answer.headers["content-type"] == "application/json"
    return answer.json


def validator(document, name: str) -> Draft202012Validator:
    registry = Registry().with_resource("urn:api", Resource.opaque(document))
    return Draft202012Validator({"$ref": f"urn:api#/components/schemas/{name}"}, registry=registry)


def references(value):
    if isinstance(value, dict):
        yield from [value["$ref"]] if isinstance(value.get("$ref"), str) else []
        for one in value.values():
            yield from references(one)
    elif isinstance(value, list):
        for one in value:
            yield from references(one)


def test_every_route_is_there_and_answers(web, document):
    assert document["openapi"] == "3.1.0" and {"/v1/completions", "/openapi.json"} < set(document["paths"])
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            has_body = "requestBody" in operation
            answer = web.send(method.upper(), path.replace("{name}", "org/alias"), {} if has_body else None)
            assert answer.status != 404 and answer.status != 405, path
            if has_body:
                validator(document, "ErrorBody").validate(answer.json)
                continue
            assert answer.status == 200 and operation["summary"]
            assert answer.headers["content-type"].split(";")[0] in operation["responses"]["200"]["content"]


def test_a_new_route_describes_itself(monkeypatch):
    """What is added to the routes needs no line elsewhere to be in the document."""

    class Ask(msgspec.Struct):
        question: str

    class Routes(app_module.Starlette):
        def __init__(self, routes, **options):
            seen.extend(routes)
            super().__init__(routes=routes, **options)

    seen: list[Route] = []
    monkeypatch.setattr(app_module, "Starlette", Routes)
    real = app_module._described

    def described(routes, server):
        routes.append(Route("/ask", app_module.Post(server, Ask, app_module._tokenize), methods=["POST"]))
        return real(routes, server)

    monkeypatch.setattr(app_module, "_described", described)
    with running() as web:
        document = web.send("GET", "/openapi.json").json
    (content,) = document["paths"]["/ask"]["post"]["requestBody"]["content"].values()
    assert content["schema"] == {"$ref": "#/components/schemas/Ask"}
    assert document["components"]["schemas"]["Ask"]["required"] == ["question"]
    assert {route.path_format for route in seen} == set(document["paths"])


def test_schemas_are_sound_and_name_nothing_that_is_missing(document):
    for name, schema in document["components"]["schemas"].items():
        Draft202012Validator.check_schema(schema)
        assert schema["title"] == name
    known = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    assert set(references(document)) == known


@pytest.mark.parametrize("kind", [CompletionRequest, ChatRequest])
def test_fields_are_those_that_are_taken(kind, document):
    fields = set(kind.__struct_fields__)
    assert set(document["components"]["schemas"][kind.__name__]["properties"]) == fields - refused_fields(ChatRequest)
    assert fields & refused_fields(ChatRequest)


def test_what_is_sound_by_it_is_taken_and_the_rest_is_not(web, document):
    requests = validator(document, "CompletionRequest")
    for fields in ({"n": 2}, {"temperature": 0.5, "stop": ["x"]}, {"prompt": [1, 2]}, {"model": "org/alias"}):
        requests.validate({"model": "fake", "prompt": "Hi"} | fields)
        assert web.complete(**fields).status == 200, fields
    for fields in ({"n": 0}, {"temperature": 3}, {"prompt": {}}, {"model": "gpt"}, {"logit_bias": {"1": 101}}):
        with pytest.raises(jsonschema.ValidationError):
            requests.validate({"model": "fake", "prompt": "Hi"} | fields)
        assert web.complete(**fields).status in (400, 404), fields


def test_errors_have_the_shape_that_it_says(document):
    errors = validator(document, "ErrorBody")
    for error in (invalid("wrong", "n"), internal("req_1")):
        errors.validate(error.body())
    with pytest.raises(jsonschema.ValidationError):
        errors.validate({"error": {"message": "m", "type": "t", "param": None, "code": None, "more": 1}})


def test_a_key_and_a_proxys_path_are_in_it(document):
    assert "security" not in document and document["servers"] == [{"url": "/"}]
    with running(api_keys=("k",), root_path="/llm") as web:
        assert web.send("GET", "/openapi.json").status == 401
        closed = web.send("GET", "/openapi.json", headers={"Authorization": "Bearer k"}).json
        assert closed["servers"] == [{"url": "/llm"}] and closed["security"] == [{"key": []}]
        assert closed["components"]["securitySchemes"]["key"] == {"type": "http", "scheme": "bearer"}
        for path, operations in closed["paths"].items():
            is_open = operations.get("get", {}).get("security") == []
            answer = web.send("GET", path.replace("{name}", "fake"))
            assert is_open == (answer.status not in (401, 405)), path
