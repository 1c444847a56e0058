"""The arguments of `ptq serve`."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from pathlib import Path

from formats.command import CommandParser, count
from inference.arguments import (
    add_adapter_argument,
    add_content_argument,
    add_engine_arguments,
    speculate_config,
)
from inference.config import EngineConfig
from inference.server.open_requests import QueueLimits
from inference.server.tools.parser import FORMATS

KEY = "PTQ_API_KEY"  # a key on a command line is seen by everybody who may list processes
BATCH_SIZES = {"cpu": 64, "cuda": 256}
SHARES = {"cpu": 0.25, "cuda": 0.9}  # of free memory; a GPU has nobody else to serve


def sizes(arguments: argparse.Namespace) -> EngineConfig:
    """The sizes of each engine that the arguments ask for; on a CPU they share its memory."""
    kind = arguments.device.partition(":")[0]
    share = arguments.kv_memory or SHARES[kind]
    return EngineConfig(
        max_batch_size=arguments.max_batch_size or BATCH_SIZES[kind],
        max_batched_tokens=arguments.max_batched_tokens,
        max_model_len=arguments.max_model_len,
        kv_blocks=arguments.kv_blocks,
        kv_memory=share / arguments.data_parallel if kind == "cpu" else share,
        prefix_cache=not arguments.no_prefix_cache,
        target_itl_ms=arguments.target_itl,
        transformers_code=arguments.transformers_code,
        invariant=arguments.invariant,
        speculate=speculate_config(arguments),
        tensor_parallel=arguments.tensor_parallel,
    )


def queue_limits(arguments: argparse.Namespace) -> QueueLimits:
    """How much may wait at each engine, so that it is what the arguments say at all together."""
    engines = arguments.data_parallel
    return QueueLimits(
        -(-arguments.max_queue // engines), -(-arguments.max_queued_tokens // engines)
    )


def parser() -> argparse.ArgumentParser:
    """The arguments of `ptq serve`."""
    made = CommandParser(
        prog="ptq serve",
        description="Answer HTTP requests as OpenAI's API does, with a page to try the model on. "
        "Ctrl-C or SIGTERM stops it when what runs has finished.",
    )
    add_engine_arguments(made)
    add_adapter_argument(made, "A request runs with the one that its `model` names")
    _add_http_arguments(made.add_argument_group("HTTP"))
    _add_size_arguments(made.add_argument_group("sizes"))
    engine = (
        "ptq (this one, the default), or vllm, or vllm=PYTHON: the interpreter of an "
        "environment that has vLLM, which is started on the checkpoint after a check of what it "
        "can take; options of `vllm serve` follow `--`"
    )
    add = made.add_argument_group("vLLM in the place of this engine").add_argument
    add("--engine", type=_engine, default=("ptq", None), metavar="ENGINE", help=engine)
    return made


def _engine(text: str) -> tuple[str, str | None]:
    """The engine, and the interpreter that has it."""
    name, equals, python = text.partition("=")
    if name not in ("ptq", "vllm") or bool(equals) != bool(python) or (name == "ptq" and equals):
        raise argparse.ArgumentTypeError(f"found {text!r}; allowed are ptq, vllm and vllm=PYTHON")
    return name, python or None


def _add_http_arguments(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--host", default="127.0.0.1", help="default 127.0.0.1: this machine alone; 0.0.0.0 is all")
    add("--port", type=_port, default=8000, help="default 8000; 0 takes a free one")
    add("--api-key", metavar="KEY", help=f"key that clients must send; better in {KEY} or a file")
    add("--api-key-file", type=Path, metavar="FILE", help="file with the key")
    prefix = "prefix that a proxy keeps, such as /llm: all routes also answer below it"
    add("--root-path", type=_root_path, metavar="PREFIX", help=prefix)
    origin = "web page that may call from a browser, such as https://example.org; repeatable"
    add("--cors-origin", action="append", default=[], metavar="ORIGIN", help=origin)
    name = "what clients call the model; default: CHECKPOINT as given; repeatable"
    add("--served-model-name", action="append", metavar="NAME", help=name)
    add("--chat-template", type=Path, metavar="FILE", help="Jinja file, instead of the model's own")
    add_content_argument(group)
    calls = "how the model writes tool calls; default: as its chat template shows"
    add("--tool-format", choices=sorted(FORMATS), help=calls)
    drain = "seconds that running requests have to finish when the server stops; default 30"
    add("--drain-seconds", type=_seconds, default=30.0, metavar="S", help=drain)
    add("--log-requests", action="store_true", help="a line for each request, without its texts")
    add("--log-texts", action="store_true", help="prompts and answers, too")
    add("--quiet", action="store_true", help="print nothing but errors")


def _add_size_arguments(group: argparse._ArgumentGroup) -> None:
    add, queue = group.add_argument, QueueLimits()
    engines = (
        "engines behind this server, each in a process of its own: on the GPUs cuda:0 to "
        "cuda:N-1 (with --device cuda:K from number K on), or each on its part of the CPU's cores"
    )
    add("--data-parallel", type=count, default=1, metavar="N", help=engines)
    most = "requests at once of an engine; default 64, GPUs 256"
    add("--max-batch-size", type=count, metavar="N", help=most)
    most, tokens = "most tokens of a step; default 2048", EngineConfig().max_batched_tokens
    add("--max-batched-tokens", type=count, default=tokens, metavar="N", help=most)
    wanted = (
        "wanted time between two tokens: beside requests that are answered, prompts are "
        "computed in smaller chunks"
    )
    add("--target-itl", type=count, metavar="MS", help=wanted)
    add("--no-prefix-cache", action="store_true", help="compute equal beginnings of prompts again")
    share = "share of the memory left by the weights, for the cache; default 0.25, GPUs 0.9"
    add("--kv-memory", type=_share, metavar="SHARE", help=share)
    add("--kv-blocks", type=count, metavar="N", help="instead: blocks of 64 tokens in the cache")
    most = "requests that may wait; further ones get 429; default 1024"
    add("--max-queue", type=count, default=queue.requests, metavar="N", help=most)
    most = "prompt tokens that may wait; default 1048576"
    add("--max-queued-tokens", type=count, default=queue.tokens, metavar="N", help=most)
    add("--max-body-mb", type=count, default=32, metavar="MB", help="size of a request; default 32")


def _root_path(text: str) -> str:
    prefix = text.rstrip("/")
    if not re.fullmatch(r"(/[\w.~-]+)+", prefix, re.ASCII) or {".", ".."} & {*prefix.split("/")}:
        raise argparse.ArgumentTypeError(f"found {text!r}; a prefix is such as /llm or /models/llm")
    if prefix.split("/")[1] in ("v1", "generate"):
        raise argparse.ArgumentTypeError(f"found {text!r}, with which routes begin; take another")
    return prefix


def _number(text: str, right: Callable[[float], bool], needed: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not right(value):
        raise argparse.ArgumentTypeError(f"found {text!r}; {needed}")
    return value


def _seconds(text: str) -> float:
    return _number(text, lambda value: 0 <= value < 1e9, "seconds from 0 on are needed")


def _share(text: str) -> float:
    return _number(text, lambda value: 0 < value < 1, "a share between 0 and 1 is needed")


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"found {text!r}; a port is 0 to 65535")
    return int(text)
