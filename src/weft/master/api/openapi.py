"""Generates the OpenAPI document from the routes and the types of the domain."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from weft import __version__
from weft.domain import kinds
from weft.domain.field_docs import MEMBERS
from weft.domain.kinds import Kind
from weft.master.api.objects import DECORATION
from weft.runtime.routes import Route

_REF = "#/components/schemas/{name}"


class Error(msgspec.Struct):
    """The body of every error."""

    code: str
    message: str
    field: str
    details: dict[str, Any]


def openapi_document(routes: Sequence[Route]) -> dict[str, Any]:
    """OpenAPI 3.1 for the routes."""
    types = [kind for route in routes for kind in (route.body, route.answer, route.alternative) if kind is not None]
    schemas, components = msgspec.json.schema_components([*types, Error], ref_template=_REF)
    for kind in kinds.ALL:
        _describe(components[kind.type.__name__], kind)
    # One schema for each type, in the same order: body, answer, alternative, route by route.
    remaining = iter(schemas)
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        body = next(remaining) if route.body is not None else None
        answer = next(remaining) if route.answer is not None else None
        if route.alternative is not None:
            answer = {"anyOf": [answer, next(remaining)]}
        paths.setdefault(route.path.rstrip("/") or "/", {})[route.method.lower()] = _operation(route, body, answer)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Weft netmaster", "version": __version__, "license": {"name": "Apache-2.0"}},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"token": []}],  # optional: netmaster on loopback needs no token
    }


def _describe(schema: dict[str, Any], kind: Kind[Any]) -> None:
    """Describe the members of a kind in its schema; read-only ones are removed, added ones are included."""
    for name, about in MEMBERS[kind.name].items():
        if name in kind.read_only_fields:
            schema["properties"].pop(name, None)
        else:
            schema["properties"][name]["description"] = about
    schema["properties"] |= {name: {"type": "string" if name == "key" else "object"} for name in DECORATION}
    if kind is kinds.NODE:
        schema["properties"]["status"] = {"type": "object"}


def _operation(route: Route, body: dict[str, Any] | None, answer: dict[str, Any] | None) -> dict[str, Any]:
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", route.path)
    ]
    parameters += [
        {"name": query.name, "in": "query", "description": query.about, "schema": query.schema} for query in route.query
    ]
    text = {"text/plain": {"schema": {"type": "string"}}}
    content = {"application/json": {"schema": answer}} if answer is not None else text
    success = {"description": "Success", "content": content}
    error = {
        "description": "Error",
        "content": {"application/json": {"schema": {"$ref": _REF.format(name="Error")}}},
    }
    operation: dict[str, Any] = {
        "summary": route.about,
        "operationId": f"{route.method.lower()}{re.sub(r'[^A-Za-z0-9]+', '_', route.path)}".rstrip("_"),
        "parameters": parameters,
        "responses": {"200": success, "4XX": error, "503": error},
    }
    # Only writes that wait for the nodes can time out.
    if any(query.name == "wait" for query in route.query):
        operation["responses"]["504"] = error
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    return operation
