"""A real server on a tiny model, which all tests share that do it no harm."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.inference.server.real_server import RealServer
from tests.inference.server.tools.templates import HERMES


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """What runs tests that are coroutines, by anyio's plugin."""
    return "asyncio"


@pytest.fixture(scope="session")
def chat_template(tmp_path_factory) -> Path:
    """A file with a chat template that knows tools, for models that have none."""
    file = tmp_path_factory.mktemp("template") / "chat.jinja"
    file.write_text(HERMES)
    return file


@pytest.fixture(scope="session")
def server(make_model: Callable[..., Path], chat_template: Path) -> Iterator[RealServer]:
    """`ptq serve` on a tiny Llama, as model `tiny`, with a chat template; leave it as it is."""
    options = ("--served-model-name", "tiny", "--chat-template", str(chat_template))
    with RealServer(make_model(max_position_embeddings=2048), *options) as started:
        yield started
