"""Routes that answer without the engine: what is served, adapters, the tokenizer, the chat page.

`/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, with the fields of vLLM's, are there only
where the server has a key, which all its routes then ask for: whoever loads an adapter has this
process read folders of the server's machine. Names of the hub are not taken.

The page is one file that is read once. No folder of files is served, so that no path leads out of
one. The page's policy lets in its own style and script, by their hashes, and connections to this
server: a text that a model writes can neither run nor load anything, even where the page's own care
(it sets text as text) should fail.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import os
import re
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import Response

from inference.requests.request import check_tokens
from inference.server.engine_client import EngineClient
from inference.server.http.responses import ApiError, Json
from inference.server.schema.chat import AnyMessage, TemplateBody, ToolFields, Tools
from inference.server.schema.generation import Body, TokenIds
from inference.server.served_model import ServedModel
from inference.server.tools.use import ToolUse

REASONS = {
    "starting": "the model is being loaded; try again soon",
    "draining": "the server is stopping; it takes no more requests",
}
PAGE = Path(__file__).with_name("page") / "index.html"
HEADERS = {
    "Cache-Control": "no-cache",  # asked for again each time, and answered by 304
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
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


class UnloadAdapterBody(Body):
    """An adapter that is loaded.

    Attributes:
        lora_name: What requests call it as their `model`.
    """

    lora_name: str = Field(min_length=1, max_length=128)


class LoadAdapterBody(UnloadAdapterBody):
    """An adapter that is to be loaded.

    Attributes:
        lora_name: What requests will call it as their `model`.
        lora_path: Its folder on the server's machine, as PEFT saves it.
    """

    lora_path: str = Field(min_length=1, max_length=4096)


async def load_adapter(request: Request, served: ServedModel, body: LoadAdapterBody) -> Response:
    """Answer `POST /v1/load_lora_adapter`."""
    if body.lora_name in served.settings.names:
        message = f"lora_name: {body.lora_name!r} is a name of the model; choose another"
        raise ApiError(400, message, "lora_name", "invalid_value")
    if not os.path.isdir(body.lora_path):  # which refuses what no path can be, too
        message = f"lora_path: the server's machine has no folder {body.lora_path!r}"
        raise ApiError(400, message, "lora_path", "invalid_value")
    await served.client.set_adapter(body.lora_name, body.lora_path)
    return Json(describe_model(served, body.lora_name))


async def unload_adapter(
    request: Request, served: ServedModel, body: UnloadAdapterBody
) -> Response:
    """Answer `POST /v1/unload_lora_adapter`."""
    await served.client.set_adapter(body.lora_name, None)
    return Json({"id": body.lora_name, "object": "model", "deleted": True})


def require_key(request: Request, served: ServedModel) -> None:
    """Refuse requests to change adapters where nobody has to show a key.

    Raises:
        ApiError: 404: the server has no key.
    """
    if served.settings.api_key is None:
        message = (
            f"{request.url.path}: a server without a key has no such route. Start it with "
            "`--api-key-file FILE`, or give adapters at its start: `--adapter NAME=FOLDER`"
        )
        raise ApiError(404, message)


ONLY_WITH_KEY = (load_adapter, unload_adapter)


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


class TokenizeBody(TemplateBody):
    """The body of `/tokenize`: a text, or the messages of a chat.

    Attributes:
        model: A name of the model.
        prompt: A text.
        messages: A chat, which the model's template writes.
        tools: What the template tells the model of, beside the chat.
        add_special_tokens: Let the tokenizer add its own to a text.
        return_token_strs: Tell the text of each token.
    """

    model: str | None = Field(default=None, max_length=512)
    prompt: str | None = None
    messages: list[AnyMessage] | None = Field(default=None, min_length=1, max_length=4096)
    tools: Tools | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _one(cls, value: Any) -> Any:
        if isinstance(value, dict) and (value.get("prompt") is None) == (
            value.get("messages") is None
        ):
            raise ValueError("give either prompt or messages")
        if isinstance(value, dict) and value.get("tools") and value.get("messages") is None:
            raise ValueError("tools belong to messages; give messages in the place of a prompt")
        return value


class DetokenizeBody(Body):
    """The body of `/detokenize`.

    Attributes:
        model: A name of the model.
        tokens: Token ids.
    """

    model: str | None = Field(default=None, max_length=512)
    tokens: TokenIds


async def tokenize(request: Request, served: ServedModel, body: TokenizeBody) -> Response:
    """Answer `POST /tokenize`."""
    tools = ToolUse.of(ToolFields(tools=body.tools), served.tools)

    def work() -> list[int]:
        if body.messages is None:
            prompt = body.prompt or ""
            return served.encode(prompt, body.add_special_tokens is not False) if prompt else []
        return served.render(body.messages, body, tools)

    tokens = await served.in_thread(work)
    texts = [served.texts.text(token) for token in tokens] if body.return_token_strs else None
    content = {
        "tokens": tokens,
        "count": len(tokens),
        "max_model_len": served.client.info.max_model_len,
        "token_strs": texts,
    }
    return Json(content)


async def detokenize(request: Request, served: ServedModel, body: DetokenizeBody) -> Response:
    """Answer `POST /detokenize`."""
    check_tokens(body.tokens, served.client.info.vocab_size, "tokens")
    return Json({"prompt": await served.in_thread(lambda: served.decode(body.tokens))})


async def tokenizer_info(request: Request, served: ServedModel) -> Response:
    """Answer `GET /tokenizer_info`: what lm-eval's remote tokenizer reads, as vLLM tells it."""
    return Json(served.tokenizer_info())


async def chat_page(request: Request) -> Response:
    """Answer `GET /` with the page, or with 304 where the browser has it."""
    body, headers = read_page()
    if headers["ETag"] in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(body, headers=headers, media_type="text/html")


@cache
def read_page() -> tuple[bytes, dict[str, str]]:
    """The page's bytes, and the headers that it is served with."""
    body = PAGE.read_bytes()
    etag = hashlib.sha256(body).hexdigest()[:32]
    return body, {**HEADERS, "Content-Security-Policy": policy(body), "ETag": f'"{etag}"'}


def policy(page: bytes) -> str:
    """The Content-Security-Policy of a page: its own style and script, and nothing else.

    Trusted types are required and none is made: where a browser knows them, HTML made of a text is
    refused. The image is the page's icon, which is written into it.
    """

    def hashes(tag: bytes) -> str:
        inner = re.findall(rb"<%b>(.*?)</%b>" % (tag, tag), page, re.DOTALL)
        digests = (base64.b64encode(hashlib.sha256(text).digest()).decode() for text in inner)
        return " ".join(f"'sha256-{digest}'" for digest in digests)

    return (
        f"default-src 'none'; script-src {hashes(b'script')}; style-src {hashes(b'style')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )
