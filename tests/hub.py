"""A small server that speaks what huggingface_hub asks of the hub for a model's snapshot."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from huggingface_hub import constants

from formats.hub import _download

COMMITS = {"main": "0123456789abcdef0123456789abcdef01234567", "v1": "1" * 40}


class Hub:
    """A hub with the models that are put into `models`.

    Attributes:
        models: Files of each model by its name.
        config: What the hub tells of each model's config.json, if anything.
        gated: Models whose files are refused.
        down: Whether every answer is an error of the server.
        asked: Every request so far: method and path.
        url: Its address.
    """

    def __init__(self) -> None:
        self.models: dict[str, dict[str, bytes]] = {}
        self.config: dict[str, dict[str, Any]] = {}
        self.gated: set[str] = set()
        self.down = False
        self.asked: list[str] = []
        self.url = ""

    def add(self, name: str, folder: Path, **more: bytes) -> None:
        """Put a model's folder on the hub, and other files by their names."""
        files = {p.relative_to(folder).as_posix(): p for p in folder.rglob("*") if p.is_file()}
        self.models[name] = {path: file.read_bytes() for path, file in files.items()} | more

    def answer(self, path: str) -> tuple[int, bytes, dict[str, str]]:
        """Status, body and headers of one address."""
        if self.down:
            return 503, b"", {}
        api = path.startswith("/api/models/")
        owner, model, *rest = path.removeprefix("/api/models").split("/")[1:]
        verb, revision, *file = rest or ["revision", "main"]
        name = f"{owner}/{model}"
        if name not in self.models:
            return 404, b"", {"X-Error-Code": "RepoNotFound"}
        commit = COMMITS.get(revision, revision)
        if commit not in COMMITS.values():
            return 404, b"", {"X-Error-Code": "RevisionNotFound"}
        if api:
            listing = self._tree(name) if verb == "tree" else self._info(name, commit)
            return 200, json.dumps(listing).encode(), {"Content-Type": "application/json"}
        if name in self.gated:
            return 403, b"", {"X-Error-Code": "GatedRepo"}
        data = self.models[name]["/".join(file)]
        etag = f'"{hashlib.sha256(data).hexdigest()}"'
        return 200, data, {"ETag": etag, "X-Repo-Commit": commit}

    def _info(self, name: str, commit: str) -> dict[str, Any]:
        siblings = [{"rfilename": path} for path in self.models[name]]
        about = {"id": name, "sha": commit, "siblings": siblings, "private": False, "tags": []}
        return about | {"config": self.config.get(name)}

    def _tree(self, name: str) -> list[dict[str, Any]]:
        return [
            {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            for path, data in self.models[name].items()
        ]


def point_at(hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let huggingface_hub ask this hub, with an empty cache, and let nothing be known already."""
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    hub.asked.clear()
    _download.cache_clear()


@contextmanager
def serve_hub() -> Iterator[Hub]:
    """A hub on a free port of this machine."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            hub.asked.append(f"{self.command} {self.path}")
            status, body, headers = hub.answer(self.path.split("?")[0])
            self.send_response(status)
            for key, value in (headers | {"Content-Length": str(len(body))}).items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
