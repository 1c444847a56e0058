"""The application on a port, before an engine without a model: `python -m ...fake_server PORT`."""

from __future__ import annotations

import asyncio
import sys

import uvicorn

from inference.server.serving import create_app
from tests.inference.server.fake_engine import FakeEngine
from tests.inference.server.http_client import settings


async def main(port: int) -> None:
    """Serve until a signal comes; say which requests are then left."""
    engine = FakeEngine()
    app = create_app(engine.client, settings())
    config = uvicorn.Config(app, port=port, log_level="error", ws="none")
    await uvicorn.Server(config).serve()
    print(f"in flight: {engine.client.in_flight}", flush=True)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
