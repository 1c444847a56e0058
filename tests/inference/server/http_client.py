"""An HTTP client of the application, before an engine without a model."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from copy import deepcopy
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from formats.tokenizer import load_tokenizer
from inference.server.serving import create_app
from inference.server.settings import ServerSettings
from tests.conftest import write_tokenizer
from tests.inference.server.fake_engine import FakeEngine

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'bad' or 'refuse' in m.content %}"
    "{{ raise_exception('such chats are refused') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@cache
def _tokenizer() -> Any:
    with TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        (Path(folder) / "config.json").write_text('{"model_type": "llama"}')
        return load_tokenizer(Path(folder))


def tokenizer() -> Any:
    """The byte-level tokenizer of the tests' models, of 384 tokens."""
    return deepcopy(_tokenizer())


def settings(**values: Any) -> ServerSettings:
    """Settings of a server whose model has a chat template."""
    return ServerSettings(
        **{"model": "tiny", "load_tokenizer": tokenizer, "chat_template": TEMPLATE} | values
    )


@asynccontextmanager
async def talking(
    make: Callable[[], FakeEngine] = FakeEngine, **values: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, FakeEngine]]:
    """A client in the process of the application, and its engine, for a minute at most.

    See `settings` for the values.
    """
    engine = make()
    app = create_app(engine.client, settings(**values))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with (
        httpx.AsyncClient(transport=transport, base_url="http://server") as client,
        asyncio.timeout(60),
    ):
        yield client, engine
    app.state.served.close()


def talk(
    scenario: Callable[[httpx.AsyncClient, FakeEngine], Awaitable[Any]],
    make: Callable[[], FakeEngine] = FakeEngine,
    **values: Any,
) -> Any:
    """What a scenario gives, with a client and its engine."""

    async def run() -> Any:
        async with talking(make, **values) as both:
            return await scenario(*both)

    return asyncio.run(run())


def ask(
    method: str,
    path: str,
    body: Any = None,
    make: Callable[[], FakeEngine] = FakeEngine,
    **values: Any,
) -> httpx.Response:
    """The answer to one request; a body of bytes is sent as it is."""
    headers = {"Content-Type": "application/json"}
    content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()

    async def scenario(client: httpx.AsyncClient, engine: FakeEngine) -> httpx.Response:
        return await client.request(method, path, content=content, headers=headers)

    return talk(scenario, make, **values)


def post(path: str, body: Any, **values: Any) -> httpx.Response:
    """The answer to a POST request."""
    return ask("POST", path, body, **values)


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, which ends as it ought to."""
    assert response.headers["content-type"].startswith("text/event-stream")
    parts = response.text.split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""], response.text[-200:]
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]
