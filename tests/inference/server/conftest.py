"""A real server on a tiny model, which all tests share that do it no harm."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.inference.server.http_client import TEMPLATE
from tests.inference.server.real_server import RealServer


@pytest.fixture(scope="session")
def chat_template(tmp_path_factory) -> Path:
    """A file with a chat template, for models that have none."""
    file = tmp_path_factory.mktemp("template") / "chat.jinja"
    file.write_text(TEMPLATE)
    return file


@pytest.fixture(scope="session")
def server(tiny_llama: Path, chat_template: Path) -> Iterator[RealServer]:
    """`ptq serve` on the tiny Llama, as model `tiny`, with a chat template; leave it as it is."""
    options = ("--served-model-name", "tiny", "--chat-template", str(chat_template))
    with RealServer(tiny_llama, *options) as started:
        yield started
