"""Progress on standard error: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from formats.later import later

if TYPE_CHECKING:
    import tqdm
else:
    tqdm = later("tqdm")

SECONDS = 10.0  # between two lines where there is no terminal
PLAIN = "{desc}: {n_fmt} of {total_fmt}{postfix}, {elapsed}"


def on_terminal() -> bool:
    """Whether a person watches standard error."""
    return sys.stderr.isatty()


def bar(
    items: Iterable[Any] | None = None,
    *,
    title: str,
    unit: str,
    total: int | None = None,
    shown: bool = True,
) -> tqdm.tqdm[Any]:
    """A bar over items, or over a total that is counted by its `update`.

    Args:
        items: What is iterated over.
        title: What is being done, such as `Comparing`.
        unit: What is counted, in the singular.
        total: How many there will be, where `items` do not tell.
        shown: Whether anything is shown.
    """
    if not shown:
        return tqdm.tqdm(items, total=total, disable=True)
    if on_terminal():
        return tqdm.tqdm(items, desc=title, unit=unit, total=total)
    return tqdm.tqdm(
        items,
        desc=title,
        total=total,
        file=_Lines(),
        mininterval=SECONDS,
        maxinterval=SECONDS,
        delay=0.1,  # nothing is told of what takes no time
        bar_format=PLAIN,
    )


def say(line: str) -> None:
    """Print a line on standard error, above the bar if there is one."""
    if on_terminal():
        tqdm.tqdm.write(line, file=sys.stderr)
    else:
        print(line, file=sys.stderr, flush=True)


class _Lines:
    """A file that makes lines of what a bar writes over itself."""

    def write(self, text: str) -> None:
        if text.strip():
            print(text.strip(), file=sys.stderr)

    def flush(self) -> None:
        sys.stderr.flush()
