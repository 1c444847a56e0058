"""`/v1/load_lora_adapter` and `/v1/unload_lora_adapter`: adapters while the server runs.

They are there only where the server has a key, which all its routes then ask for: whoever loads an
adapter has this process read folders of the server's machine. Names of the hub are not taken.
"""

from __future__ import annotations

import os

from starlette.requests import Request
from starlette.responses import Response

from inference.server.generation.served_model import ServedModel
from inference.server.http.body import read_body
from inference.server.http.errors import ApiError
from inference.server.http.responses import Json
from inference.server.routes.about import describe_model
from inference.server.schema.adapters import LoadAdapterBody, UnloadAdapterBody


async def load_adapter(request: Request, served: ServedModel) -> Response:
    """Answer `POST /v1/load_lora_adapter`."""
    _require_key(request, served)
    body = await read_body(request, LoadAdapterBody, served.settings.limits)
    if body.lora_name in served.settings.names:
        message = f"lora_name: {body.lora_name!r} is a name of the model; choose another"
        raise ApiError(400, message, "lora_name", "invalid_value")
    if not os.path.isdir(body.lora_path):  # which refuses what no path can be, too
        message = f"lora_path: the server's machine has no folder {body.lora_path!r}"
        raise ApiError(400, message, "lora_path", "invalid_value")
    await served.client.set_adapter(body.lora_name, body.lora_path)
    return Json(describe_model(served, body.lora_name))


async def unload_adapter(request: Request, served: ServedModel) -> Response:
    """Answer `POST /v1/unload_lora_adapter`."""
    _require_key(request, served)
    body = await read_body(request, UnloadAdapterBody, served.settings.limits)
    await served.client.set_adapter(body.lora_name, None)
    return Json({"id": body.lora_name, "object": "model", "deleted": True})


def _require_key(request: Request, served: ServedModel) -> None:
    if served.settings.api_key is None:
        message = (
            f"{request.url.path}: a server without a key has no such route. Start it with "
            "`--api-key-file FILE`, or give adapters at its start: `--adapter NAME=FOLDER`"
        )
        raise ApiError(404, message)
