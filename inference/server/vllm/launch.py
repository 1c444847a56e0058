"""Starting vLLM on a checkpoint: our arguments in its words, and what has none refused by name."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from formats.errors import RequestError
from formats.namespace import ROOT
from inference.config import EngineConfig
from inference.server.vllm.check import Shards, check_vllm

SERVE = ["-m", "vllm.entrypoints.cli.main", "serve"]
THEIR_KEY = "VLLM_API_KEY"  # in the environment, where not everybody reads it
FIND = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
INSTALL = (
    "It pins its own torch, so install it in an environment of its own: `python -m venv "
    "/envs/vllm && /envs/vllm/bin/pip install vllm`, and give --engine vllm=/envs/vllm/bin/python"
)
CONTROL_TOKENS = (
    "chats: vLLM makes control tokens of those that messages spell, as this engine does by "
    "--special-tokens-in-content alone."
)
OURS = {  # argument: the option that vLLM has in its place, if it has one
    "speculate": "--speculative-config",
    "depth": "--speculative-config",
    "invariant": "VLLM_BATCH_INVARIANT=1 in the environment",
    "kv_memory": "--gpu-memory-utilization",
    "kv_blocks": "--num-gpu-blocks-override",
    "target_itl": "--long-prefill-token-threshold",
    "tool_format": "--enable-auto-tool-choice --tool-call-parser",
    "cors_origin": "--allowed-origins",
    "log_texts": "--enable-log-requests",
    "max_queue": None,
    "max_queued_tokens": None,
    "max_body_mb": None,
    "drain_seconds": "--shutdown-timeout",
}


def start_vllm(
    arguments: argparse.Namespace,
    defaults: argparse.Namespace,
    folder: Path,
    key: str | None,
    further: Sequence[str],
) -> NoReturn:
    """Check a checkpoint, tell what differs, and become vLLM's server, which then has all signals.

    Args:
        arguments: Of `ptq serve`.
        defaults: The same where nothing is given.
        folder: Of the checkpoint.
        key: What clients have to show, or None.
        further: Options of vLLM's own.

    Raises:
        RequestError: vLLM is not installed, cannot serve the checkpoint, or has no such option.
    """
    refuse_ours(arguments, defaults)
    notes = check_vllm(folder, Shards(arguments.tensor_parallel, arguments.pipeline_parallel))
    if not arguments.special_tokens_in_content:
        notes = [*notes, CONTROL_TOKENS]
    python = arguments.engine[1] or sys.executable
    require_vllm(python)
    command = [python, *SERVE, *vllm_options(arguments, folder), *further]
    if not arguments.quiet:
        for note in notes:
            print(f"  - {note}")
        print(f"starting {shlex.join(command)}")
    sys.stdout.flush()
    os.execve(python, command, _environment(key))


def _environment(key: str | None) -> dict[str, str]:
    """Ours with the key, and without our packages in the way of others of their names."""
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    others = [path for path in paths if path and Path(path).resolve() != ROOT]
    found = os.environ | {"PYTHONPATH": os.pathsep.join(others), "PYTHONSAFEPATH": "1"}
    return found | ({} if key is None else {THEIR_KEY: key})


def refuse_ours(arguments: argparse.Namespace, defaults: argparse.Namespace) -> None:
    """Refuse what was asked for and vLLM would not do.

    Raises:
        RequestError: tells each, with vLLM's own option where there is one.
    """
    told = []
    for name, theirs in OURS.items():
        if getattr(arguments, name) != getattr(defaults, name):
            option = f"--{name.replace('_', '-')}"
            instead = f"vLLM's own is {theirs}" if theirs else "vLLM has nothing like it"
            told.append(f"{option} is of this engine alone; {instead}")
    _, _, number = arguments.device.partition(":")
    if number:
        told.append(f"--device {arguments.device}: set CUDA_VISIBLE_DEVICES={number} for vLLM")
    if told:
        lines = "\n  ".join(told)
        raise RequestError(f"--engine vllm does not take\n  {lines}\nIts options follow `--`")


def require_vllm(python: str) -> None:
    """Check that an interpreter has vLLM; without loading it, which takes seconds.

    Raises:
        RequestError: it has not, or is none.
    """
    try:
        found = subprocess.run([python, "-c", FIND], capture_output=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RequestError(f"--engine vllm={python}: it does not run ({error})") from error
    if found.returncode:
        raise RequestError(f"--engine vllm: {python} has no vLLM. {INSTALL}")


def vllm_options(arguments: argparse.Namespace, folder: Path) -> list[str]:
    """The checkpoint, and what was asked for in vLLM's words."""
    names = arguments.served_model_name or [str(arguments.checkpoint)]
    return [str(folder), "--served-model-name", *names, *_options(arguments)]


def _options(arguments: argparse.Namespace) -> Iterator[str]:
    tokens, usual = arguments.max_batched_tokens, EngineConfig().max_batched_tokens
    values = {
        "--host": arguments.host,
        "--port": arguments.port,
        "--max-model-len": arguments.max_model_len,
        "--max-num-seqs": arguments.max_batch_size,
        "--max-num-batched-tokens": tokens if tokens != usual else None,
        "--chat-template": arguments.chat_template,
        "--root-path": arguments.root_path,
        "--distributed-executor-backend": arguments.executor,
    }
    for option, value in values.items():
        if value is not None:
            yield from (option, str(value))
    for option, number in (
        ("--tensor-parallel-size", arguments.tensor_parallel),
        ("--pipeline-parallel-size", arguments.pipeline_parallel),
        ("--data-parallel-size", arguments.data_parallel),
    ):
        if number > 1:
            yield from (option, str(number))
    for option, wanted in (
        ("--no-enable-prefix-caching", arguments.no_prefix_cache),
        ("--model-impl=transformers", arguments.transformers_code),
        ("--enable-log-requests", arguments.log_requests),
    ):
        if wanted:
            yield option
