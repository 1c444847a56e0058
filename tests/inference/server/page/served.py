"""A server with a fake engine in a thread of this process, for a browser to visit."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import uvicorn

from formats.tokenizer import load_tokenizer
from inference.requests.request import SamplingParams
from inference.server.serving import create_app
from inference.server.settings import ServerSettings
from tests.inference.server.fake_engine import INFO, FakeEngine

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


class Site:
    """A running server; as a context, it ends with it.

    Args:
        folder: Of a tokenizer.
        chats: Give it a chat template.
        warm: Have the engine ready at once.
        settings: Of the server.

    Attributes:
        url: Of the page.
        engine: The fake one; `call` changes it.
        prompts: What the engine was asked, as texts.
        params: How.
    """

    def __init__(
        self, folder: Path, *, chats: bool = True, warm: bool = True, **settings: Any
    ) -> None:
        template = TEMPLATE if chats else None
        self._settings = ServerSettings(
            model="tiny", load_tokenizer=lambda: load_tokenizer(folder), chat_template=template
        )
        self._settings = replace(self._settings, **settings)
        self._tokenizer, self._warm = load_tokenizer(folder), warm
        self._texts: list[str] = []
        self.prompts: list[str] = []
        self.params: list[SamplingParams] = []
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._begun = threading.Event()

    def __enter__(self) -> Site:
        self._thread.start()
        assert self._begun.wait(20)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.should_exit = True
        self._thread.join(20)

    def says(self, *texts: str, delay: float = 0.0) -> None:
        """Give these answers, the last of them from then on, with so many seconds a token."""
        self._texts = list(texts)
        self.prompts.clear()
        self.params.clear()
        self.engine.refuse, self.engine.hold, self.engine.delay = None, False, delay
        self.engine.sent.clear()

    def call(self, function: Callable[[], object]) -> None:
        """Call a function where the server runs, and wait for it."""
        done = threading.Event()
        self._loop.call_soon_threadsafe(lambda: (function(), done.set()))
        assert done.wait(20)

    def _answer(self, prompt: Sequence[int], params: SamplingParams) -> list[int]:
        self.prompts.append(self._tokenizer.decode(prompt))
        self.params.append(params)
        text = self._texts.pop(0) if len(self._texts) > 1 else self._texts[0]
        return [*self._tokenizer.encode(text), self._tokenizer.eos_token_id]

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        info = replace(INFO, max_model_len=8192, max_positions=8192)
        self.engine = FakeEngine(answer=self._answer, info=info, warm=self._warm)
        app = create_app(self.engine.client, self._settings)
        config = uvicorn.Config(app, port=0, log_level="error", timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(config)
        serving = asyncio.create_task(self._server.serve())
        while not self._server.started:
            await asyncio.sleep(0.005)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}/"
        self._begun.set()
        await serving
