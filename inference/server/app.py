"""The HTTP application: routes before the engine's client, after the key, and their description."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from formats.errors import PTQError
from inference.server import routes
from inference.server.fleet import ServedEngine
from inference.server.formatters import chat, completions, responses
from inference.server.http.requests import KeyCheck, RequestLog, RootPath, read_body
from inference.server.http.responses import ApiError, Refusal, api_error, unless_gone
from inference.server.schema.responses import ResponsesBody
from inference.server.served_model import ServedModel
from inference.server.settings import ServerSettings

Handler = Callable[..., Coroutine[Any, Any, Response]]  # of the request, the model, its body if any
JSON, EVENTS, PLAIN = "application/json", "text/event-stream", "text/plain"
ROUTES: list[tuple[str, str, Handler, type[BaseModel] | None, tuple[str, ...]]] = [
    ("GET", "/health", routes.health, None, (JSON,)),
    ("GET", "/metrics", routes.metrics, None, (PLAIN,)),
    ("GET", "/version", routes.version, None, (JSON,)),
    ("GET", "/v1/models", routes.models, None, (JSON,)),
    ("GET", "/v1/models/{model:path}", routes.model, None, (JSON,)),
    ("POST", "/v1/completions", completions.complete, completions.CompletionBody, (JSON, EVENTS)),
    ("POST", "/v1/chat/completions", chat.chat, chat.ChatBody, (JSON, EVENTS)),
    ("POST", "/v1/responses", responses.respond, ResponsesBody, (JSON, EVENTS)),
    ("POST", "/v1/load_lora_adapter", routes.load_adapter, routes.LoadAdapterBody, (JSON,)),
    ("POST", "/v1/unload_lora_adapter", routes.unload_adapter, routes.UnloadAdapterBody, (JSON,)),
    ("POST", "/tokenize", routes.tokenize, routes.TokenizeBody, (JSON,)),
    ("POST", "/detokenize", routes.detokenize, routes.DetokenizeBody, (JSON,)),
    ("GET", "/tokenizer_info", routes.tokenizer_info, None, (JSON,)),
    ("POST", "/generate", completions.generate, completions.GenerateBody, (JSON, EVENTS)),
    ("POST", "/generate/stream", completions.generate_stream, completions.GenerateBody, (EVENTS,)),
]
REFS = "#/components/schemas/{model}"


def _object(**properties: Any) -> dict[str, Any]:
    """The schema of an object that has all of these."""
    return {"type": "object", "required": [*properties], "properties": properties}


TEXT, TEXT_OR_NULL = {"type": "string"}, {"type": ["string", "null"]}
ERROR = _object(error=_object(message=TEXT, type=TEXT, param=TEXT_OR_NULL, code=TEXT_OR_NULL))
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


def create_app(client: ServedEngine, settings: ServerSettings) -> FastAPI:
    """The application.

    Raises:
        CheckpointError: the tokenizer cannot be loaded.
        RequestError: the chat template cannot be read.
    """
    served = ServedModel(client, settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        served.close()

    app = FastAPI(
        title="ptq serve",
        docs_url=None,  # their pages load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
    )
    app.state.served = served
    for method, path, handler, model, kinds in ROUTES:
        endpoint, name = _endpoint(handler, model, served), handler.__name__
        extra = _operation(path, model, kinds)
        app.add_api_route(path, endpoint, methods=[method], name=name, openapi_extra=extra)
        if method == "GET":  # probes ask for the status alone
            app.add_api_route(path, endpoint, methods=["HEAD"], include_in_schema=False)
    app.add_route("/", routes.chat_page, include_in_schema=False)
    app.openapi = lambda: _describe(app, settings.root_path)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ApiError, _refuse)
    app.add_exception_handler(PTQError, _refuse)
    if settings.api_key is not None:
        app.add_middleware(KeyCheck, key=settings.api_key)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    if settings.root_path:
        app.add_middleware(RootPath, prefix=settings.root_path)
    app.add_middleware(RequestLog, metrics=served.metrics, settings=settings)  # the outermost
    return app


def _endpoint(
    handler: Handler, model: type[BaseModel] | None, served: ServedModel
) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        if model is None:
            return await handler(request, served)
        if handler in routes.ONLY_WITH_KEY:
            routes.require_key(request, served)
        body = await read_body(request, model, served.settings.limits)
        served.check_model(getattr(body, "model", None))
        answer = handler(request, served, body)
        return await (answer if handler in routes.ONLY_WITH_KEY else unless_gone(request, answer))

    endpoint.__doc__ = handler.__doc__
    return endpoint


def _describe(app: FastAPI, prefix: str) -> dict[str, Any]:
    """FastAPI's description with the schemas of the bodies, which the routes read themselves."""
    if app.openapi_schema is None:
        servers: list[dict[str, Any]] | None = [{"url": prefix}] if prefix else None
        document = get_openapi(title=app.title, version="1", routes=app.routes, servers=servers)
        models = [model for *_, model, _ in ROUTES if model is not None]
        _, made = models_json_schema([(m, "validation") for m in models], ref_template=REFS)
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        schemas |= made.get("$defs", {}) | {"Error": ERROR}
        for path in document["paths"].values():
            for one in path.values():
                one["responses"].pop("422", None)  # what FastAPI's own checks would answer
        app.openapi_schema = document
    return app.openapi_schema


def _operation(path: str, model: type[BaseModel] | None, kinds: tuple[str, ...]) -> dict[str, Any]:
    """Arguments of a route for FastAPI: the body it reads, the media types it answers with."""
    statuses = READING if model is None else WRITING
    content = {kind: {"schema": {}} for kind in kinds}
    responses: dict[str, Any] = {"200": {"description": "The answer", "content": content}}
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    responses |= {str(s): {"description": STATUSES[s], "content": error} for s in statuses}
    extra: dict[str, Any] = {"responses": responses}
    names = re.findall(r"{(\w+)", path)
    if names:
        fixed = {"in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        extra["parameters"] = [{"name": name} | fixed for name in names]
    if model is not None:
        body = {JSON: {"schema": {"$ref": REFS.format(model=model.__name__)}}}
        extra["requestBody"] = {"required": True, "content": body}
    return extra


async def _refuse(request: Request, error: Exception) -> Response:
    """Of a handler: what is wrong with the request, or with the engine."""
    assert isinstance(error, ApiError | PTQError)
    return Refusal(api_error(error))


async def _http_error(request: Request, error: Exception) -> Response:
    """Of the router: no such route (404), or none for the method (405)."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    message = f"{path}: there is no such route; /openapi.json tells which there are"
    headers = error.headers
    if error.status_code == 405:  # GET and HEAD of a path are two routes
        found = (route for route in request.app.routes if route.matches(request.scope)[0].value)
        allowed = ", ".join(sorted({method for route in found for method in route.methods}))
        message, headers = f"{path}: it has no {request.method}, but {allowed}", {"Allow": allowed}
    return Refusal(ApiError(error.status_code, message, headers=headers))
