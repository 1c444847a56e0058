"""`ptq certify`: a checkpoint against its original, figure by figure, with a verdict of each.

    ptq certify CHECKPOINT --against MODEL [--level full] [--prompts FILE] [--seed N]
    ptq certify CHECKPOINT --verify

Writes certificate.json and certificate.html into the checkpoint. `--verify` measures a seeded
sample of a certificate again and compares every digit.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from formats.command import CommandParser, device
from formats.errors import RequestError
from formats.gguf.locate import locate_model
from formats.hub import model_argument
from formats.namespace import later
from ptq.commands.shared import add_quiet
from ptq.output import CERTIFICATE_PAGE
from ptq.text import format_table, typed_path

with later():
    from ptq.certify import measuring, page


def parser() -> argparse.ArgumentParser:
    """The arguments of `ptq certify`."""
    made = CommandParser(
        prog="ptq certify",
        description="Certify what quantization cost: texts, answers, JSON and long contexts, "
        "each paired with the original, with an interval, a test and a verdict.",
        epilog="Exit codes: 0 green, amber or untested; 1 red, or not the same digits; 2 errors.",
    )
    made.add_argument("checkpoint", type=model_argument, help="folder of a quantized model")
    made.add_argument(
        "--against",
        type=model_argument,
        metavar="MODEL",
        help="the original: a folder, or on the hub",
    )
    made.add_argument(
        "--level", choices=("quick", "full"), default="quick", help="how much; default quick"
    )
    made.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="text or chats in the place of our own text, in a file as `ptq quantize --data` takes",
    )
    made.add_argument("--seed", type=_seed, default=0, metavar="N", help="of prompts and tasks")
    made.add_argument("--device", type=_device, default="auto", help="auto (default), cpu, cuda:N")
    made.add_argument(
        "--verify", action="store_true", help="measure a sample of the certificate again"
    )
    add_quiet(made)
    return made


def _seed(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"found {text!r}; a whole number from 0 on is needed")
    return int(text)


def _device(text: str) -> str:
    return text if text == "auto" else device(text)


def main(argv: Sequence[str] | None = None) -> int:
    """Certify a checkpoint, or verify its certificate; 1 where that is red or not the same."""
    arguments = parser().parse_args(argv)
    given = {name: getattr(arguments, name) for name in ("against", "prompts", "seed")}
    progress = not arguments.quiet
    folder = locate_model(arguments.checkpoint, progress=progress)
    if arguments.verify:
        count, differences = measuring.verify(folder, **given, progress=progress)
        print(
            "\n".join(f"NOT THE SAME: {line}" for line in differences)
            or f"verified: {count} cases gave the same digits"
        )
        return 1 if differences else 0
    if arguments.against is None:
        raise RequestError("--against: give the original model, which the checkpoint was made from")
    level, device = arguments.level, arguments.device
    found = measuring.certify(folder, **given, level=level, device=device, progress=progress)
    print(format_table(page.summary_rows(found)))
    print()
    for figure in found.figures:
        if figure.verdict in ("red", "amber"):
            print(f"{figure.verdict.upper()}: {figure.name}: {figure.reason}")
    print(f"verdict: {found.headline}")
    print(f"certificate: {typed_path(folder.absolute() / CERTIFICATE_PAGE)}")
    return 1 if found.verdict == "red" else 0
