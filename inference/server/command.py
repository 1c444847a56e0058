"""`ptq serve`: answers OpenAI's HTTP requests with a checkpoint, and shows a page to try it on.

    ptq serve CHECKPOINT [--port 8000] [--device cuda]

HTTP runs in this process, each engine in a child. Nothing is loaded, and no library of either
imported, before the arguments are right and the port is ours.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from formats.command import run_command
from formats.errors import RequestError
from formats.gguf.locate import locate_model
from formats.namespace import later
from formats.stored.folder import read_config
from inference.arguments import read_adapters
from inference.server.arguments import KEY, parser, queue_limits, sizes
from inference.server.engine.process import EngineProcess, EngineSource, places, usable_cores
from inference.server.engine_client import EngineClient
from inference.server.fleet import EngineFleet, ServedEngine
from inference.server.messages import EngineInfo
from inference.server.settings import Limits, ServerSettings
from inference.server.vllm import start_vllm

with later():
    from formats import tokenizer as tokenizers
    from formats.checkpoint import read as checkpoints
    from inference.server import serving
    from inference.server import serving as apps

INSTALL = "pip install 'ptq[serve]'"
NEEDED = ("fastapi", "uvicorn", "httptools", "prometheus_client")
LOCAL = ("127.0.0.1", "::1", "localhost")
LOG = logging.getLogger("ptq.serve")
ENDING = 3.0  # seconds in which the engine's process has to end by itself


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal stops it; 0 where all that ran could finish, or was answered why not."""
    words = list(sys.argv[1:] if argv is None else argv)
    end = words.index("--") if "--" in words else len(words)
    arguments, further = parser().parse_args(words[:end]), words[end + 1 :]
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise RequestError(
            "torchrun has started this server as one of several processes, which cannot listen on "
            "one port. Leave torchrun out: --tensor-parallel N starts N processes itself"
        )
    key, path = _key(arguments), arguments.chat_template
    template = None if path is None else _read(path, "--chat-template")
    if arguments.engine[0] == "vllm":
        folder = locate_model(arguments.checkpoint, arguments.revision)
        start_vllm(arguments, folder, key, further)
    if further:
        raise RequestError(f"-- {' '.join(further)}: of vLLM; add --engine vllm, or leave it out")
    require_extra()
    folder = locate_model(arguments.checkpoint, arguments.revision)
    read_config(folder)  # a folder of something else is refused at once
    adapters = _adapters(arguments)
    config, visible = sizes(arguments), os.environ.get("CUDA_VISIBLE_DEVICES")
    engines, ranks = arguments.data_parallel, arguments.tensor_parallel
    found = places(arguments.device, engines, usable_cores(), ranks, visible)
    with listen(arguments.host, arguments.port) as listener:
        sources = [EngineSource(folder, config, place, adapters) for place in found]
        processes = [EngineProcess(source) for source in sources]
        try:
            _serve(arguments, key, template, folder, listener, processes)
        finally:
            for process in processes:
                process.close()
            for process in processes:
                process.end(ENDING)
    return 0


def _serve(
    arguments: argparse.Namespace,
    key: str | None,
    template: str | None,
    folder: Path,
    listener: socket.socket,
    processes: Sequence[EngineProcess],
) -> None:
    """Serve on a socket, while processes load the engines and then run them."""
    checkpoint = checkpoints.Checkpoint.open(folder)
    settings = _settings(arguments, key, template, checkpoint.path)
    limits = queue_limits(arguments)
    clients = [EngineClient(process.send, limits) for process in processes]
    client: ServedEngine = clients[0]
    if len(clients) > 1:
        client = EngineFleet(clients, prefix_cache=not arguments.no_prefix_cache)
    app = apps.create_app(client, settings)
    address = _address(arguments.host, listener)

    def greet(info: EngineInfo) -> None:
        if not arguments.quiet:
            chat = app.state.served.has_template
            print(greeting(info, settings, address, chat=chat), flush=True)

    _begin_log(settings)
    if key is None and arguments.host not in LOCAL:
        LOG.warning("whoever reaches %s may use the model; --api-key-file asks for a key", address)
    serving.Serving(app, listener, client, processes, arguments.drain_seconds, greet).run()


def _begin_log(settings: ServerSettings) -> None:
    """Write what the server logs to standard error, a line each with its time."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    LOG.addHandler(handler)
    LOG.setLevel(logging.INFO if settings.log_requests else logging.WARNING)


def greeting(info: EngineInfo, settings: ServerSettings, address: str, *, chat: bool) -> str:
    """What is printed when requests are answered: what runs, where, and a line to try it with."""
    route, body = "completions", {"prompt": "def add(a, b):", "max_tokens": 32, "temperature": 0}
    if chat:
        route, body = "chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}
    data = json.dumps({"model": settings.model} | body)
    quoted = data.replace("'", "'\\''")
    key = f' -H "Authorization: Bearer ${KEY}"' if settings.api_key else ""
    stop = "Ctrl-C stops it, when what runs has finished; a second one at once."
    return (
        f"{settings.model} ({info.quantization}) on {info.device}: {info.max_batch_size} requests "
        f"at once, up to {info.max_model_len} tokens each, a cache of "
        f"{info.kv_blocks * info.block_size} tokens\n"
        f"listening on {address}/v1, with a page to try it at {address}/\n\n"
        f"    curl {address}/v1/{route}{key} -H 'Content-Type: application/json' -d '{quoted}'\n\n"
        f"{stop}"
    )


def missing_extra() -> list[str]:
    """Libraries of a server that are not installed; `INSTALL` brings them."""
    return [name for name in NEEDED if find_spec(name) is None]


def require_extra() -> None:
    """Check that the libraries of a server are installed.

    Raises:
        RequestError: one is not.
    """
    if missing := missing_extra():
        raise RequestError(
            f"{', '.join(missing)}: not installed; a server needs more than the rest of ptq: "
            f"`{INSTALL}`"
        )


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there.

    Raises:
        RequestError: it cannot be had.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
        try:
            if os.name == "posix":  # elsewhere it would share the port of another server
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(2048)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise RequestError(
            f"--host {host} --port {port}: {error.strerror or error}. Choose another port, or "
            "--port 0 for a free one"
        ) from error
    return listener


def _address(host: str, listener: socket.socket) -> str:
    """Where a client of this machine finds a listener."""
    name = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host).strip("[]")
    name = f"[{name}]" if ":" in name else name
    return f"http://{name}:{listener.getsockname()[1]}"


def _key(arguments: argparse.Namespace) -> str | None:
    """What clients have to show: out of a file, else the argument, else the environment."""
    if arguments.api_key_file is None:
        key = arguments.api_key if arguments.api_key is not None else os.environ.get(KEY)
    else:
        key = _read(arguments.api_key_file, "--api-key-file").strip()
    if key is not None and not (key.isascii() and key.isprintable() and key.strip() == key != ""):
        raise RequestError("the API key: it must be printable ASCII, and not be empty")
    return key


def _adapters(arguments: argparse.Namespace) -> dict[str, Path]:
    """Folders by name, which is none of the model's."""
    for name in arguments.served_model_name or [str(arguments.checkpoint)]:
        if name in arguments.adapter:
            raise RequestError(f"--adapter {name}: so the model is called; choose another name")
    return read_adapters(arguments)


def _read(path: Path, argument: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{argument} {path}: it cannot be read as UTF-8 ({error})") from error


def _settings(
    arguments: argparse.Namespace, key: str | None, template: str | None, folder: Path
) -> ServerSettings:
    model, *aliases = arguments.served_model_name or [str(arguments.checkpoint)]
    return ServerSettings(
        model=model,
        aliases=tuple(aliases),
        load_tokenizer=lambda: tokenizers.load_tokenizer(folder),
        created=int(time.time()),
        chat_template=template,
        special_tokens_in_content=arguments.special_tokens_in_content,
        tool_format=arguments.tool_format,
        api_key=key,
        root_path=arguments.root_path or "",
        cors_origins=tuple(arguments.cors_origin),
        log_requests=arguments.log_requests or arguments.log_texts,
        log_texts=arguments.log_texts,
        limits=Limits(body_bytes=arguments.max_body_mb * 2**20),
    )


if __name__ == "__main__":
    raise SystemExit(run_command(main))
