"""The outer boundary of every command line.

Its progress goes to standard error: a bar on a terminal, plain lines elsewhere.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import gc
import io
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from formats.errors import PTQError
from formats.namespace import later

with later():
    import tqdm


def count(text: str) -> int:
    """A number of rows, requests or tokens on a command line, for `type=` of an argument."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}; a whole number from 1 on is needed")
    return int(text)


def device(text: str) -> str:
    """A device on a command line, for `type=` of an argument; whether it is here, others tell."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"found {text!r}; allowed are cpu, cuda and cuda:N")
    return text


class CommandParser(argparse.ArgumentParser):
    """Arguments of a command; whatever is wrong, an option that it does not know gets a guess."""

    _given: Sequence[str] = ()

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        # A shell leaves `--output=~/x` as it stands, and `~` would become a folder of that name.
        self.register("type", Path, lambda text: Path(os.path.expanduser(text)))

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """`argparse.ArgumentParser.parse_args`."""
        self._given = list(sys.argv[1:] if args is None else args)
        return super().parse_args(self._given, namespace)

    def error(self, message: str) -> NoReturn:
        """Print the usage and what is wrong, and end the process with exit code 2."""
        options = [text for action in self._actions for text in action.option_strings]
        for text in self._given:
            name = text.partition("=")[0]
            if name.startswith("--") and not any(known.startswith(name) for known in options):
                words = {known.strip("-"): known for known in options}
                close = get_close_matches(name.strip("-"), words, 1)
                guess = f"; did you mean {words[close[0]]}?" if close else ""
                message = f"{message}; there is no {name}{guess}"
        super().error(message)


class Terminated(BaseException):
    """SIGTERM: ends a command as Ctrl-C does, also where Ctrl-C stops only what it is doing."""


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM end a command as Ctrl-C does, with all that it has to tidy up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _tell(line: str, error: BaseException) -> None:
    """Print an error with its notes."""
    print("\n".join([line, *getattr(error, "__notes__", ())]), file=sys.stderr)


def run_command(
    main: Callable[[Sequence[str] | None], int], argv: Sequence[str] | None = None
) -> int:
    """Run a command's `main` and return its exit code.

    Errors that are the user's to act on are printed as `error: ...` without a trace, with exit code
    2; an interrupt gives 130, and SIGTERM, which cleans up as an interrupt does, 143. The notes of
    an error follow it. Whatever else goes wrong is a defect and keeps its trace. A character that
    the terminal's encoding lacks is printed as `?`.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        with _terminable():
            return main(argv)
    except PTQError as error:
        _tell(f"error: {error}", error)
        return 2
    except Terminated as error:
        _tell("terminated", error)
        return 143
    except KeyboardInterrupt as error:
        _tell("interrupted", error)
        return 130
    except BrokenPipeError:  # the reader of our output, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _tell(f"error: {error}, for what is printed or kept; free some, or write elsewhere", error)
        return 2
    finally:
        if argv is None:  # the process ends: to look through all that is alive takes a second
            gc.freeze()


PR_SET_PDEATHSIG = 1  # Linux, prctl(2): a signal for when the parent dies


def end_with(parent: int) -> None:
    """Have the system kill this process when its parent dies, whatever it does then; on Linux.

    Args:
        parent: Its process id; if that is no longer the parent, this process ends at once.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before
        os._exit(1)


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
        title: What is being done, such as `Comparing`.
        unit: What is counted, in the singular.
        total: How many there will be, where `items` do not tell.
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
        delay=0.1,  # no bar for what takes no time
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
