"""What is served and how it is: `/v1/models`, `/health`, `/version`, `/metrics`."""

from __future__ import annotations

import importlib.metadata
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from inference.server.engine_client import EngineClient
from inference.server.generation.served_model import ServedModel
from inference.server.http.errors import ApiError
from inference.server.http.responses import Json

REASONS = {
    "starting": "the model is being loaded; try again soon",
    "draining": "the server is stopping; it takes no more requests",
}


def describe_model(served: ServedModel, name: str) -> dict[str, Any]:
    """The model, or an adapter with it as its parent, as `/v1/models` tells it."""
    info, base = served.client.info, served.settings.model
    folder = None if name in served.settings.names else served.client.adapters[name]
    return {
        "id": name,
        "object": "model",
        "created": served.settings.created,
        "owned_by": "ptq",
        "root": base if folder is None else folder,
        "parent": None if folder is None else base,
        "max_model_len": info.max_model_len,
        "quantization": info.quantization,
        "kv_cache": info.kv_cache,
        "has_chat_template": served.has_template,
    }


async def models(request: Request, served: ServedModel) -> Response:
    """Answer `GET /v1/models`."""
    names = (*served.settings.names, *served.client.adapters)
    return Json({"object": "list", "data": [describe_model(served, name) for name in names]})


async def model(request: Request, served: ServedModel) -> Response:
    """Answer `GET /v1/models/{id}`."""
    name = request.path_params["model"]
    served.check_model(name)
    return Json(describe_model(served, name))


async def health(request: Request, served: ServedModel) -> Response:
    """Answer `GET /health`: 200 when requests are answered, otherwise 503 and why not.

    Of several engines it tells each; `degraded` is a server that goes on without a dead one.
    """
    client = served.client
    if client.state == "ready":
        engines = [_engine(number, engine) for number, engine in enumerate(client.engines)]
        degraded = any(engine["state"] == "dead" for engine in engines)
        content = {"engines": engines} if len(engines) > 1 else {}
        return Json({"status": "degraded" if degraded else "ready"} | content)
    reason = REASONS.get(client.state) or f"the engine is dead: {client.reason}"
    raise ApiError(503, reason, code=client.state, headers={"Retry-After": "5"})


def _engine(number: int, engine: EngineClient) -> dict[str, Any]:
    content = {"engine": number, "device": engine.info.device, "state": engine.state}
    return content | ({"reason": engine.reason} if engine.reason else {})


async def version(request: Request, served: ServedModel) -> Response:
    """Answer `GET /version`."""
    try:
        version = importlib.metadata.version("ptq")
    except importlib.metadata.PackageNotFoundError:
        version = "a checkout that is not installed"
    return Json({"version": version})


async def metrics(request: Request, served: ServedModel) -> Response:
    """Answer `GET /metrics`, for Prometheus."""
    content, kind = served.metrics.render(request.headers.get("accept", ""))
    return Response(content, headers={"Content-Type": kind})
