"""The description of the routes in the format of OpenAPI 3.1, made of the routes and of their requests' types."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from msgspec import Struct
from starlette.routing import Route

import jaxllm
from jaxllm.server.config import ServerConfig
from jaxllm.server.http.middleware import ADMIN_PATHS, PUBLIC_PATHS
from jaxllm.server.openai.decoding import refused_fields

_REF = "#/components/schemas/{name}"
_JSON, _EVENTS = "application/json", "text/event-stream"
_OTHER_TYPES = {"/": "text/html", "/metrics": "text/plain"}


class ErrorFields(Struct, kw_only=True, forbid_unknown_fields=True):
    """What is wrong, with which parameter."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Struct, forbid_unknown_fields=True):
    """The body of every error, and the data of a stream's last event if it fails."""

    error: ErrorFields


def describe(routes: Iterable[Route], config: ServerConfig, *, timeout_header: str) -> bytes:
    """The document for these routes, in JSON. An endpoint with an attribute `kind` takes a JSON body of that type; the
    summary of another is its docstring."""
    routes = list(routes)
    kinds = [kind for route in routes if (kind := _kind(route)) is not None]
    _, schemas = msgspec.json.schema_components([*kinds, ErrorBody], ref_template=_REF)
    for kind in kinds:
        _adapt(kind, schemas[kind.__name__]["properties"], config.served_model_names)
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "jaxllm", "version": jaxllm.__version__},
        "servers": [{"url": config.root_path or "/"}],
        "paths": {route.path_format: _operations(route, timeout_header) for route in routes},
        "components": {"schemas": schemas},
    }
    bearer = {"type": "http", "scheme": "bearer"}
    schemes = {"key": bearer} if config.api_keys else {}
    if config.api_keys:
        document["security"] = [{"key": []}]
    if config.admin_api_key is not None:
        schemes["admin_key"] = bearer
    if schemes:
        document["components"]["securitySchemes"] = schemes
    return msgspec.json.encode(document)


def _kind(route: Route) -> type[Struct] | None:
    return getattr(route.endpoint, "kind", None)


def _adapt(kind: type[Struct], properties: dict[str, Any], names: Sequence[str]) -> None:
    """Leaves out what this server refuses, and names its models."""
    for name in refused_fields(kind):
        properties.pop(name, None)
    if "model" in properties:
        is_optional = "default" in properties["model"]
        properties["model"] = {"enum": [*names, None], "default": None} if is_optional else {"enum": [*names]}


def _operations(route: Route, timeout_header: str) -> dict[str, Any]:
    kind, path = _kind(route), route.path_format
    types = [_OTHER_TYPES.get(path, _JSON)]
    if kind is not None and "stream" in kind.__struct_fields__:
        types.append(_EVENTS)
    answer = {"description": "the answer", "content": {name: {} for name in types}}
    error = {"description": "an error", "content": {_JSON: {"schema": _ref(ErrorBody)}}}
    operation: dict[str, Any] = {"responses": {"200": answer, "default": error}}
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in route.param_convertors
    ]
    if kind is None:
        operation["summary"] = " ".join((route.endpoint.__doc__ or path).split())
    else:
        operation["requestBody"] = {"required": True, "content": {_JSON: {"schema": _ref(kind)}}}
        seconds = {"type": "number", "exclusiveMinimum": 0}
        about = "seconds after which the request is given up"
        parameters.append({"name": timeout_header, "in": "header", "description": about, "schema": seconds})
    if parameters:
        operation["parameters"] = parameters
    if path in ADMIN_PATHS:
        operation["security"] = [{"admin_key": []}]
    if path in PUBLIC_PATHS:
        operation["security"] = []
        operation["responses"]["503"] = {"description": "it is not so", "content": {_JSON: {}}}
    return {
        method.lower(): {**operation, "operationId": f"{method.lower()}{path}"}
        for method in sorted(route.methods or ())
        if method != "HEAD"
    }


def _ref(kind: type[Struct]) -> dict[str, str]:
    return {"$ref": _REF.format(name=kind.__name__)}
