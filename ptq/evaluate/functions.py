"""Functions to be completed, and a process in which what a model wrote is run against tests."""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile

SECONDS = 5


MEMORY = 1 << 30  # bytes


FUNCTIONS: tuple[tuple[str, str], ...] = (
    ('def add(a, b):\n    """Return the sum of a and b."""\n    return', "assert add(2, 3) == 5"),
    (
        'def is_empty(items):\n    """Return True if items has no elements."""\n    return',
        "assert is_empty([]) and not is_empty([0])",
    ),
    (
        'def first(items):\n    """Return the first of items."""\n    return',
        "assert first([4, 5, 6]) == 4",
    ),
    (
        'def last(items):\n    """Return the last of items."""\n    return',
        "assert last([4, 5, 6]) == 6",
    ),
    (
        'def count(items):\n    """Return the number of items."""\n    return',
        "assert count('abcd') == 4",
    ),
    (
        'def upper(text):\n    """Return text in upper case."""\n    return',
        "assert upper('aB') == 'AB'",
    ),
    (
        'def larger(a, b):\n    """Return the larger of the two."""\n    if a > b:\n        return',
        "assert larger(2, 1) == 2",
    ),
    (
        'def double(x):\n    """Return x times two."""\n    return',
        "assert double(7) == 14",
    ),
    (
        'def is_none(value):\n    """Return whether value is None."""\n    return',
        "assert is_none(None) and not is_none(0)",
    ),
    (
        'def keys(mapping):\n    """Return a list of the keys of mapping."""\n    return',
        "assert list(keys({'a': 1, 'b': 2})) == ['a', 'b']",
    ),
    (
        'def join(parts):\n    """Join the strings in parts with commas."""\n    return',
        "assert join(['a', 'b']) == 'a,b'",
    ),
    (
        'def reverse(items):\n    """Return items in reverse order, as a list."""\n    return',
        "assert list(reverse([1, 2, 3])) == [3, 2, 1]",
    ),
    (
        "class Point:\n    def __init__(self, x, y):\n        self.x = x\n        self.y =",
        "assert Point(1, 2).y == 2",
    ),
    (
        "class Stack:\n    def __init__(self):\n        self.items = []\n\n"
        "    def push(self, item):\n        self.items.",
        "s = Stack(); s.push(3); assert s.items == [3]",
    ),
    (
        "def total(values):\n    result = 0\n    for value in values:\n        result +=",
        "total([1, 2])",
    ),
    (
        'def contains(items, item):\n    """Return whether item is in items."""\n    return',
        "assert contains([1, 2], 2) and not contains([1, 2], 3)",
    ),
)


def passes(code: str, tests: str) -> bool:
    """Whether code runs, and its tests hold, in a process of its own.

    It is isolated from the user's packages and environment and works in an empty folder that is
    removed; its time, memory, files and processes are limited. That keeps a model's mistakes from
    doing harm, and is no prison for code that means harm: allow it for models that are trusted.

    Args:
        code: A module's source.
        tests: Statements that raise where it is wrong.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-S", "-c", f"{code}\n\n{tests}\n"],
                cwd=folder,
                env={},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=SECONDS,
                preexec_fn=_limit,
                start_new_session=True,
            )
        except subprocess.TimeoutExpired:
            return False
    return done.returncode == 0


def _limit() -> None:
    """Bound what the process may use, before it runs what a model wrote."""
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
