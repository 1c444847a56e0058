"""The description of the routes, `/openapi.json`: bodies, and every status that can come."""

from __future__ import annotations

import re
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

REFS = "#/components/schemas/{model}"
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
STATUSES = {
    400: "The request is wrong; `param` names the field",
    401: "The key is missing or wrong",
    404: "There is no such model or route",
    405: "The route has other methods",
    408: "The body did not come in time",
    413: "The body is too large",
    415: "The body is no JSON in UTF-8",
    429: "Too much waits; Retry-After tells when to come back",
    500: "The engine failed at this request, or a defect of the server",
    503: "The engine loads, stops or is dead",
}
READING, WRITING = (400, 401, 404, 405, 500, 503), tuple(STATUSES)


def _error(status: int) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {"description": STATUSES[status], "content": content}


def operation(path: str, model: type[BaseModel] | None, kinds: tuple[str, ...]) -> dict[str, Any]:
    """Arguments of a route for FastAPI: the body it reads, what it answers with.

    Args:
        path: The route's, with its parameters in braces.
        model: Of the body, if it has one.
        kinds: Media types of its answers.
    """
    statuses = READING if model is None else WRITING
    content = {kind: {"schema": {}} for kind in kinds}
    responses: dict[str, Any] = {"200": {"description": "The answer", "content": content}}
    responses |= {str(status): _error(status) for status in statuses}
    extra: dict[str, Any] = {"responses": responses}
    names = re.findall(r"{(\w+)", path)
    if names:
        fixed = {"in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        extra["parameters"] = [{"name": name} | fixed for name in names]
    if model is not None:
        schema = {"$ref": REFS.format(model=model.__name__)}
        extra["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema}},
        }
    return extra


def complete(document: dict[str, Any], models: list[type[BaseModel]]) -> dict[str, Any]:
    """FastAPI's description with the schemas of the bodies, which the routes read themselves."""
    _, made = models_json_schema([(model, "validation") for model in models], ref_template=REFS)
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    schemas |= made.get("$defs", {}) | {"Error": ERROR}
    for path in document["paths"].values():
        for one in path.values():
            one["responses"].pop("422", None)  # what FastAPI's own checks would answer
    return document
