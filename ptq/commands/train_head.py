"""`ptq train-head`: train a head that drafts a model's next tokens (EAGLE-3).

    ptq train-head recipes/tiny-python output/head --data /folder/of/text --sequences 2000
    ptq predict CHECKPOINT --prompt 'def add(' --speculate eagle=output/head

The head serves the model and every quantized checkpoint of it. It is written in the layout in which
such heads are published, so that other runtimes read it, too.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from calibrate.spec import DatasetSpec, SplitSpec
from formats.command import CommandParser, count, device
from formats.later import later
from ptq.commands.arguments import add_quiet
from ptq.text import typed_path

if TYPE_CHECKING:
    from ptq.draft_head import command
else:
    command = later("ptq.draft_head.command")


def parser() -> argparse.ArgumentParser:
    """The arguments of `ptq train-head`."""
    made = CommandParser(
        prog="ptq train-head",
        description="Train a head that drafts a model's next tokens (EAGLE-3).",
    )
    made.add_argument("model", help="folder of a float model, or organization/model on the hub")
    made.add_argument("head", type=Path, help="folder that gets the head")
    made.add_argument(
        "--data",
        default="stdlib",
        metavar="SOURCE",
        help="text: a file or folder of text, tables, a name for datasets.load_dataset, or stdlib, "
        "the default. Take what the model will write",
    )
    made.add_argument("--column", default="text", metavar="NAME", help="of tables; default text")
    made.add_argument(
        "--messages-column", metavar="NAME", help="of tables of chats, in the place of --column"
    )
    made.add_argument(
        "--sequences", type=count, default=10_000, metavar="N", help="at most; default 10000"
    )
    made.add_argument(
        "--sequence-length", type=count, default=512, metavar="N", help="tokens; default 512"
    )
    made.add_argument(
        "--own-text",
        action="store_true",
        help="let the model write on behind the first eighth of each sequence, and train on that: "
        "its drafts are compared with what it writes",
    )
    made.add_argument("--epochs", type=count, default=1, metavar="N", help="default 1")
    made.add_argument(
        "--vocabulary",
        type=count,
        default=32_000,
        metavar="N",
        help="draft only the N most frequent tokens of the text; default 32000",
    )
    made.add_argument(
        "--blocks",
        type=int,
        nargs="+",
        metavar="N",
        help="blocks of the model whose inputs the head reads, from 0; default: 2, the middle one, "
        "and the third last",
    )
    made.add_argument(
        "--heads", type=count, metavar="N", help="of the head's attention; default: the model's"
    )
    made.add_argument(
        "--intermediate-size",
        type=count,
        metavar="N",
        help="of the head's feed-forward layer; default: the model's",
    )
    made.add_argument(
        "--bits",
        type=int,
        choices=(16, 8),
        default=16,
        help="of the head's weights as they are written: 16, the default, or 8, half the bytes",
    )
    made.add_argument(
        "--batch-size", type=count, default=4, metavar="N", help="sequences; default 4"
    )
    made.add_argument(
        "--learning-rate", type=float, default=2e-3, metavar="X", help="default 0.002"
    )
    made.add_argument(
        "--minutes",
        type=float,
        default=math.inf,
        metavar="X",
        help="most time of training, after the text is read: the learning rate falls to zero by "
        "then; default: as long as the epochs take",
    )
    made.add_argument("--seed", type=int, default=0, metavar="N", help="default 0")
    made.add_argument("--device", type=device, default="cpu", help="cpu (the default) or cuda")
    add_quiet(made)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Train a head and write it."""
    arguments = parser().parse_args(argv)
    amount = SplitSpec(samples=arguments.sequences, sequence_length=arguments.sequence_length)
    data = DatasetSpec(
        name=arguments.data,
        column=arguments.column,
        messages_column=arguments.messages_column,
        fewer=True,
        calibration=amount,
    )
    command.run(arguments, data)
    print(f"head: {typed_path(arguments.head)}")
    return 0
