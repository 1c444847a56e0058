"""`ptq convert`: a checkpoint in another layout.

    ptq convert SRC DST --to gptq|gptq_v2|awq|fp8_block|paddle
    ptq convert SRC DST --to compressed_tensors [--tables DIR]
    ptq convert SRC DST --to float [--dtype TYPE] [--adapter FOLDER]
    ptq convert SRC DST.gguf
    ptq convert SRC.gguf DST

The first from a compressed-tensors folder; the second from GPTQ, AWQ, AutoRound, FP8 blocks,
bitsandbytes' int8 or neural-compressor's huggingface format, or from a model with PaddleNLP's
tables of scales beside it; the third from all of these, from bitsandbytes' nf4 and
fp4, and from GPTQ with act-order, of 2 and 3 bits, or in groups of any size; the fourth from a
compressed-tensors folder or a float model, for llama.cpp, Ollama and LM Studio; the last from a
file of theirs.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from formats.command import CommandParser
from formats.gguf.locate import is_gguf, locate_source
from formats.hub import model_argument
from formats.namespace import later
from ptq.commands.shared import add_quiet
from ptq.convert import FLOAT_TYPES, TARGETS

with later():
    import ptq.convert.convert as conversion


def parser() -> argparse.ArgumentParser:
    """The arguments of `ptq convert`."""
    made = CommandParser(
        prog="ptq convert", description="Write a quantized checkpoint in another layout."
    )
    made.add_argument(
        "source",
        type=model_argument,
        metavar="SRC",
        help="folder, its name on the hub, or a .gguf file",
    )
    made.add_argument("out", type=Path, metavar="DST", help="folder to make, or DST.gguf")
    made.add_argument(
        "--to",
        choices=TARGETS,
        help="layout to write; default gguf for DST.gguf, compressed_tensors of SRC.gguf",
    )
    made.add_argument("--tables", type=Path, metavar="DIR", help="PaddleNLP's tables of scales")
    made.add_argument(
        "--dtype", choices=FLOAT_TYPES, help="type of float weights, else config.json's"
    )
    made.add_argument(
        "--adapter",
        metavar="FOLDER",
        help="a LoRA adapter that PEFT saved, merged in by --to float",
    )
    made.add_argument("--force", action="store_true", help="replace DST if it exists")
    add_quiet(made)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Convert a checkpoint; 0 on success."""
    arguments = (own := parser()).parse_args(argv)
    target = arguments.to or _usual(arguments)
    if target is None:
        own.error(f"--to is needed: {', '.join(TARGETS)}")
    source = locate_source(arguments.source)
    done = conversion.convert(
        source,
        arguments.out,
        target,
        tables=arguments.tables,
        dtype=arguments.dtype,
        adapter=arguments.adapter,
        force=arguments.force,
        progress=not arguments.quiet,
    )
    print("\n".join(conversion.describe(done, arguments.out, target)))
    return 0


def _usual(arguments: argparse.Namespace) -> str | None:
    """The layout that the names alone ask for."""
    if arguments.out.suffix.lower() == ".gguf":
        return "gguf"
    return "compressed_tensors" if is_gguf(arguments.source) else None
