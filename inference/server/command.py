"""`ptq serve`: answers OpenAI's HTTP requests with a checkpoint, and shows a page to try it on.

    ptq serve CHECKPOINT [--port 8000] [--device cuda]

HTTP runs in this process, the engine in its child. Nothing is loaded, and no library of either
imported, before the arguments are right and the port is ours.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import socket
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from formats.command import CommandParser, count, run_command
from formats.errors import RequestError
from formats.later import later
from formats.stored.folder import read_config
from formats.stored.other_kinds import locate_model
from inference.arguments import add_engine_arguments
from inference.config import EngineConfig
from inference.server.engine_client import EngineClient
from inference.server.engine_process import EngineProcess, EngineSource
from inference.server.messages import EngineInfo
from inference.server.open_requests import QueueLimits
from inference.server.settings import Limits, ServerSettings
from inference.server.tools.tool_format import tool_formats

if TYPE_CHECKING:
    from formats import tokenizer as tokenizers
    from formats.checkpoint import read as checkpoints
    from inference.server import app as apps
    from inference.server import serving
else:
    apps = later("inference.server.app")
    checkpoints = later("formats.checkpoint.read")
    serving = later("inference.server.serving")
    tokenizers = later("formats.tokenizer")

NEEDED = ("fastapi", "uvicorn", "httptools", "prometheus_client")
BATCH_SIZES = {"cpu": 64, "cuda": 256}
SHARES = {"cpu": 0.25, "cuda": 0.9}  # of free memory; a GPU has nobody else to serve
LOCAL = ("127.0.0.1", "::1", "localhost")
LOG = logging.getLogger("ptq.serve")
KEY = "PTQ_API_KEY"  # a key on a command line is seen by everybody who may list processes
ENDING = 3.0  # seconds in which the engine's process has to end by itself


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until told to stop; 0 where all that ran could finish or was told why not."""
    arguments = parser().parse_args(argv)
    require_extra()
    key, template = _key(arguments), _template(arguments)
    folder = locate_model(arguments.checkpoint, arguments.revision)
    read_config(folder)  # a folder of something else is told at once
    with listen(arguments.host, arguments.port) as listener:
        process = EngineProcess(EngineSource(folder, _sizes(arguments), arguments.device))
        try:
            _serve(arguments, key, template, folder, listener, process)
        finally:
            process.end(ENDING)
    return 0


def _serve(
    arguments: argparse.Namespace,
    key: str | None,
    template: str | None,
    folder: Path,
    listener: socket.socket,
    process: EngineProcess,
) -> None:
    """Serve on a socket, while a process loads the engine and then runs it."""
    checkpoint = checkpoints.Checkpoint.open(folder)
    settings = _settings(arguments, key, template, checkpoint.path)
    limits = QueueLimits(arguments.max_queue, arguments.max_queued_tokens)
    client = EngineClient(process.send, limits)
    app = apps.create_app(client, settings)
    address = _address(arguments.host, listener)

    def greet(info: EngineInfo) -> None:
        if not arguments.quiet:
            chat = app.state.served.has_template
            print(greeting(info, settings, address, chat=chat), flush=True)

    _begin_log(settings)
    if key is None and arguments.host not in LOCAL:
        LOG.warning("whoever reaches %s may use the model; --api-key-file asks for a key", address)
    serving.Serving(app, listener, client, process, arguments.drain_seconds, greet).run()


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
        f"at once, up to {info.max_model_len} tokens each, a cache for "
        f"{info.kv_blocks * info.block_size}\n"
        f"listening on {address}/v1, with a page to try it at {address}/\n\n"
        f"    curl {address}/v1/{route}{key} -H 'Content-Type: application/json' -d '{quoted}'\n\n"
        f"{stop}"
    )


def require_extra() -> None:
    """Check that the libraries of a server are installed.

    Raises:
        RequestError: one is not.
    """
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise RequestError(
            f"{', '.join(missing)}: not installed; a server needs more than the rest of ptq: "
            "`pip install 'ptq[serve]'`"
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
    name = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}.get(host, host)
    port = listener.getsockname()[1]
    return (
        f"http://[{name}]:{port}"
        if ":" in name.strip("[]") and name[0] != "["
        else f"http://{name}:{port}"
    )


def _key(arguments: argparse.Namespace) -> str | None:
    """What clients have to show: out of a file, else the argument, else the environment."""
    if arguments.api_key_file is None:
        key = arguments.api_key if arguments.api_key is not None else os.environ.get(KEY)
    else:
        key = _read(arguments.api_key_file, "--api-key-file").strip()
    if key is not None and not (key.isascii() and key.isprintable() and key.strip() == key != ""):
        raise RequestError("the API key: it must be printable ASCII, and not be empty")
    return key


def _template(arguments: argparse.Namespace) -> str | None:
    path = arguments.chat_template
    return None if path is None else _read(path, "--chat-template")


def _read(path: Path, argument: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{argument} {path}: it cannot be read as UTF-8 ({error})") from error


def _sizes(arguments: argparse.Namespace) -> EngineConfig:
    kind = arguments.device.partition(":")[0]
    return EngineConfig(
        max_batch_size=arguments.max_batch_size or BATCH_SIZES[kind],
        max_batched_tokens=arguments.max_batched_tokens,
        max_model_len=arguments.max_model_len,
        kv_blocks=arguments.kv_blocks,
        kv_memory=arguments.kv_memory or SHARES[kind],
        prefix_cache=not arguments.no_prefix_cache,
        target_itl_ms=arguments.target_itl,
    )


def _settings(
    arguments: argparse.Namespace, key: str | None, template: str | None, folder: Path
) -> ServerSettings:
    names: list[str] = arguments.served_model_name or [str(arguments.checkpoint)]

    def load_tokenizer() -> Any:
        return tokenizers.load_tokenizer(folder)

    return ServerSettings(
        model=names[0],
        aliases=tuple(names[1:]),
        load_tokenizer=load_tokenizer,
        created=int(time.time()),
        chat_template=template,
        tool_format=arguments.tool_format,
        api_key=key,
        cors_origins=tuple(arguments.cors_origin),
        log_requests=arguments.log_requests or arguments.log_texts,
        log_texts=arguments.log_texts,
        limits=Limits(body_bytes=arguments.max_body_mb * 2**20),
    )


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e9:
        raise argparse.ArgumentTypeError(f"found {text!r}; seconds from 0 on are needed")
    return value


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}; a share between 0 and 1 is needed")
    return value


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"found {text!r}; a port is 0 to 65535")
    return int(text)


def parser() -> argparse.ArgumentParser:
    """The arguments of `ptq serve`."""
    made = CommandParser(
        prog="ptq serve",
        description="Answer HTTP requests as OpenAI's API does, with a page to try the model on. "
        "Ctrl-C or SIGTERM stops it when what runs has finished.",
    )
    add_engine_arguments(made)
    _add_http_arguments(made.add_argument_group("HTTP"))
    _add_size_arguments(made.add_argument_group("sizes"))
    return made


def _add_http_arguments(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--host", default="127.0.0.1", help="default 127.0.0.1: this machine alone; 0.0.0.0 is all")
    add("--port", type=_port, default=8000, help="default 8000; 0 takes a free one")
    add("--api-key", metavar="KEY", help=f"what clients have to show; better in {KEY} or a file")
    add("--api-key-file", type=Path, metavar="FILE", help="holds the key")
    add(
        "--cors-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="a web page's that may call from a browser, such as https://example.org; repeatable",
    )
    add(
        "--served-model-name",
        action="append",
        metavar="NAME",
        help="what clients call the model; default: CHECKPOINT as given; repeatable",
    )
    add("--chat-template", type=Path, metavar="FILE", help="Jinja, in the place of the model's own")
    add(
        "--tool-format",
        choices=sorted(tool_formats()),
        help="how the model writes calls of tools; default: as its chat template tells",
    )
    add(
        "--drain-seconds",
        type=_seconds,
        default=30.0,
        metavar="S",
        help="in which what runs may finish when the server is stopped; default 30",
    )
    add("--log-requests", action="store_true", help="a line for each request, without its texts")
    add("--log-texts", action="store_true", help="prompts and answers, too")
    add("--quiet", action="store_true", help="print nothing but errors")


def _add_size_arguments(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--max-batch-size", type=count, metavar="N", help="requests at once; default 64, GPUs 256")
    add(
        "--max-batched-tokens",
        type=count,
        default=EngineConfig().max_batched_tokens,
        metavar="N",
        help="most tokens of a step; default 2048",
    )
    add(
        "--target-itl",
        type=count,
        metavar="MS",
        help="wanted time between two tokens: beside requests that are answered, prompts are "
        "computed in smaller chunks",
    )
    add("--no-prefix-cache", action="store_true", help="compute equal beginnings of prompts again")
    add(
        "--kv-memory",
        type=_share,
        metavar="SHARE",
        help="of the memory that is free beside the weights, for the cache; default 0.25, GPUs 0.9",
    )
    add("--kv-blocks", type=count, metavar="N", help="instead: blocks of 64 tokens in the cache")
    add(
        "--max-queue",
        type=count,
        default=QueueLimits().requests,
        metavar="N",
        help="requests that may wait; one more is told to come back (429); default 1024",
    )
    add(
        "--max-queued-tokens",
        type=count,
        default=QueueLimits().tokens,
        metavar="N",
        help="tokens of prompts that may wait; default 1048576",
    )
    add("--max-body-mb", type=count, default=32, metavar="MB", help="of a request; default 32")


if __name__ == "__main__":
    raise SystemExit(run_command(main))
