"""The HTTP application: routes before the engine's client, behind the key."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from formats.errors import PTQError
from inference.server.engine_client import ServedEngine
from inference.server.generation.served_model import ServedModel
from inference.server.http import openapi
from inference.server.http.errors import ApiError, api_error
from inference.server.http.middleware import KeyCheck, RequestLog, RootPath
from inference.server.http.responses import Refusal
from inference.server.page.route import chat_page
from inference.server.routes import about, adapters, chat, completions, responses, tokens
from inference.server.schema.adapters import LoadAdapterBody, UnloadAdapterBody
from inference.server.schema.chat import ChatBody
from inference.server.schema.completions import (
    CompletionBody,
    DetokenizeBody,
    GenerateBody,
    TokenizeBody,
)
from inference.server.schema.responses import ResponsesBody
from inference.server.settings import ServerSettings

Handler = Callable[[Request, ServedModel], Awaitable[Response]]
JSON, EVENTS, PLAIN = "application/json", "text/event-stream", "text/plain"
ROUTES: list[tuple[str, str, Handler, type[BaseModel] | None, tuple[str, ...]]] = [
    ("GET", "/health", about.health, None, (JSON,)),
    ("GET", "/metrics", about.metrics, None, (PLAIN,)),
    ("GET", "/version", about.version, None, (JSON,)),
    ("GET", "/v1/models", about.models, None, (JSON,)),
    ("GET", "/v1/models/{model:path}", about.model, None, (JSON,)),
    ("POST", "/v1/completions", completions.complete, CompletionBody, (JSON, EVENTS)),
    ("POST", "/v1/chat/completions", chat.chat, ChatBody, (JSON, EVENTS)),
    ("POST", "/v1/responses", responses.respond, ResponsesBody, (JSON, EVENTS)),
    ("POST", "/v1/load_lora_adapter", adapters.load_adapter, LoadAdapterBody, (JSON,)),
    ("POST", "/v1/unload_lora_adapter", adapters.unload_adapter, UnloadAdapterBody, (JSON,)),
    ("POST", "/tokenize", tokens.tokenize, TokenizeBody, (JSON,)),
    ("POST", "/detokenize", tokens.detokenize, DetokenizeBody, (JSON,)),
    ("GET", "/tokenizer_info", tokens.tokenizer_info, None, (JSON,)),
    ("POST", "/generate", completions.generate, GenerateBody, (JSON, EVENTS)),
    ("POST", "/generate/stream", completions.generate_stream, GenerateBody, (EVENTS,)),
]


def create_app(client: ServedEngine, settings: ServerSettings) -> FastAPI:
    """The application.

    Args:
        client: The engine.
        settings: What the command line said.

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
        app.add_api_route(
            path,
            _endpoint(handler, served),
            methods=[method],
            name=handler.__name__,
            openapi_extra=openapi.operation(path, model, kinds),
        )
    app.add_route("/", chat_page, include_in_schema=False)
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
    logged = {"log_requests": settings.log_requests, "log_texts": settings.log_texts}
    app.add_middleware(RequestLog, metrics=served.metrics, **logged)  # the outermost
    return app


def _endpoint(handler: Handler, served: ServedModel) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return await handler(request, served)

    endpoint.__doc__ = handler.__doc__
    return endpoint


def _describe(app: FastAPI, prefix: str) -> dict[str, Any]:
    if app.openapi_schema is None:
        servers: list[dict[str, Any]] | None = [{"url": prefix}] if prefix else None
        document = get_openapi(title=app.title, version="1", routes=app.routes, servers=servers)
        models = [model for *_, model, _ in ROUTES if model is not None]
        app.openapi_schema = openapi.complete(document, models)
    return app.openapi_schema


async def _refuse(request: Request, error: Exception) -> Response:
    """Of a handler: what is wrong with the request, or with the engine."""
    if isinstance(error, PTQError):
        error = api_error(error)
    assert isinstance(error, ApiError)
    return Refusal(error)


async def _http_error(request: Request, error: Exception) -> Response:
    """Of the router: no such route (404), or none for the method (405)."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    message = f"{path}: there is no such route; /openapi.json tells which there are"
    if error.status_code == 405:
        message = f"{path}: it has no {request.method}, but {(error.headers or {}).get('Allow')}"
    return Refusal(ApiError(error.status_code, message, headers=error.headers))
