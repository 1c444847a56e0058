"""The HTTP process: its application, and how it serves until signals end it.

Routes are before the engine's client, after the key. The first signal drains the process, the
second ends it at once. A connection is uvicorn's, with limits on what comes before a request is
one. The application bounds bodies; a line and headers that never end, or never come, are bounded
here. What is no HTTP is answered by an error object, as everything else is.
"""

from __future__ import annotations

import asyncio
import gc
import os
import re
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from formats.errors import EngineError, PTQError
from inference.server import routes
from inference.server.engine.process import EngineProcess
from inference.server.engine_client import Unavailable
from inference.server.fleet import ServedEngine
from inference.server.formatters import chat, completions, responses
from inference.server.http.requests import KeyCheck, RequestLog, RootPath, read_body
from inference.server.http.responses import ApiError, Refusal, api_error, dumps, unless_gone
from inference.server.messages import EngineInfo
from inference.server.schema.responses import ResponsesBody
from inference.server.served_model import ServedModel
from inference.server.settings import Limits, ServerSettings

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


GRACE = 1.0  # seconds for which health still tells that the engine is dead
LAST_BYTES = 5  # seconds in which clients have to take the end of what they were answered
IDLE = 75  # seconds of a connection between requests; clients that keep one for long close it first
REASONS = {400: "Bad Request", 408: "Request Timeout", 431: "Request Header Fields Too Large"}
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class BoundedProtocol(HttpToolsProtocol):
    """A connection.

    Args:
        limits: What is read, and how long it is waited for; other arguments are uvicorn's.
    """

    def __init__(self, *args: Any, limits: Limits, **named: Any) -> None:
        super().__init__(*args, **named)
        self._limits = limits
        self._head: int | None = 0  # bytes of a line and headers that are not all there
        self._late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore
        """A client connected."""
        super().connection_made(transport)
        connection = transport.get_extra_info("socket")
        if connection is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
            # For what is sent without the application, such as the rest of a long answer.
            timeout = round(self._limits.write_seconds * 1000)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """It left."""
        self._have_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes."""
        super().data_received(data)
        if self._head is not None:
            self._head += len(data)
            if self._head > self._limits.header_bytes:
                message = f"line and headers have more than {self._limits.header_bytes} bytes"
                self._refuse(ApiError(431, message))

    def on_message_begin(self) -> None:
        """The first byte of a request is there."""
        super().on_message_begin()
        if self._head is None:
            self._expect_head()

    def on_headers_complete(self) -> None:
        """Its line and its headers are there."""
        self._have_head()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """This is no HTTP."""
        self._refuse(ApiError(400, f"this is no HTTP request: {msg}", code="invalid_http"))

    def _expect_head(self) -> None:
        self._head = 0
        error = ApiError(408, "the request's headers did not come in time")
        self._late = self.loop.call_later(self._limits.read_seconds, self._refuse, error)

    def _have_head(self) -> None:
        self._head = None
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _refuse(self, error: ApiError) -> None:
        """Tell it and close; not in the middle of an answer to the request before."""
        if not self.transport.is_closing():
            if self.cycle is None or self.cycle.response_complete:
                body = dumps(error.content).encode()
                head = f"HTTP/1.1 {error.status} {REASONS[error.status]}\r\n"
                head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
                self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
            self.transport.close()
        self._have_head()


class _Server(uvicorn.Server):
    """A server that leaves signals to us: it would end what runs instead of waiting for it."""

    def capture_signals(self) -> AbstractContextManager[None]:
        return nullcontext()


class Serving:
    """An application on a socket before engine processes, until a signal stops it.

    Args:
        listener: A bound socket, taken over.
        processes: Those of its engines, in their order.
        drain_seconds: In which what runs may finish.
        on_ready: Called once the engine is warm.
    """

    def __init__(
        self,
        app: Any,
        listener: socket.socket,
        client: ServedEngine,
        processes: Sequence[EngineProcess],
        drain_seconds: float,
        on_ready: Callable[[EngineInfo], None],
    ) -> None:
        self._config = uvicorn.Config(
            app,
            http=partial(BoundedProtocol, limits=app.state.served.settings.limits),  # pyright: ignore
            lifespan="on",
            ws="none",
            log_level="warning",
            access_log=False,  # the application logs requests
            server_header=False,
            timeout_keep_alive=IDLE,
            timeout_graceful_shutdown=LAST_BYTES,
        )
        self._listener, self._client, self._processes = listener, client, processes
        self._drain_seconds, self._on_ready = drain_seconds, on_ready
        self._stopping = False

    def run(self) -> None:
        """Serve until a signal comes and what runs has ended.

        Raises:
            EngineError: an engine could not be loaded, or all died; clients know it.
        """
        before = [signal.getsignal(number) for number in SIGNALS]
        try:
            with asyncio.Runner(loop_factory=self._config.get_loop_factory()) as runner:
                runner.run(self._serve())
        finally:
            for number, handler in zip(SIGNALS, before, strict=True):
                signal.signal(number, handler)

    async def _serve(self) -> None:
        client, server, stop = self._client, _Server(self._config), asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            signal.signal(number, lambda number, _: self._on_signal(number, loop, stop))
        for process, engine in zip(self._processes, client.engines, strict=True):
            await process.connect(engine)
        tasks = [
            serving := asyncio.create_task(server.serve(sockets=[self._listener])),
            dead := asyncio.create_task(client.dead()),
            stopped := asyncio.create_task(stop.wait()),
        ]
        greeting = asyncio.create_task(self._greet())
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if stopped.done():
            await client.drain(self._drain_seconds)
        elif dead.done():
            await asyncio.sleep(GRACE)
        server.should_exit = True
        await serving
        for task in (dead, stopped, greeting):
            task.cancel()
        for process in self._processes:
            process.disconnect()
        if client.reason is not None:
            raise EngineError(client.reason)

    async def _greet(self) -> None:
        with suppress(Unavailable):
            info = await self._client.ready()
            gc.collect()
            gc.freeze()  # what is loaded stays: no collection looks at it again
            self._on_ready(info)

    def _on_signal(self, number: int, loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
        """Drain; where that is under way, end at once."""
        if self._stopping:
            _tell("ended; what ran is lost\n")
            for process in self._processes:
                process.kill()
            os._exit(128 + number)
        self._stopping = True
        _tell(f"stopping: what runs may finish, for {self._drain_seconds:g} s; once more ends it\n")
        loop.call_soon_threadsafe(stop.set)


def _tell(line: str) -> None:
    """Write to standard error where a signal is handled; a full disk there stops no stopping."""
    with suppress(OSError):
        os.write(2, line.encode())  # print is not safe here: it may be what was interrupted
