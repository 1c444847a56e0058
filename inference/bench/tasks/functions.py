"""Functions of Python's standard library, and the same with a variable renamed."""

from __future__ import annotations

import ast
import io
import sysconfig
import textwrap
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from formats.errors import RequestError

# of those that recipes evaluate models on (`calibrate.sources`), which none is calibrated on
MODULES = tuple(
    "pdb pickle pickletools plistlib pprint profile pstats random runpy selectors shelve shlex"
    " shutil smtplib socket socketserver statistics subprocess tarfile tempfile textwrap threading"
    " trace traceback typing uuid weakref".split()
)
NAMES = ("value", "entry", "target", "record", "found")  # that variables are renamed to
LEAST = 3  # times that a variable is there


@dataclass(frozen=True)
class Edit:
    """A function with a variable renamed.

    Attributes:
        old: Its name before.
        new: Its name in `text`.
        text: The function with that name.
    """

    old: str
    new: str
    text: str


def library_functions() -> list[list[str]]:
    """Sources of the functions and methods of some modules, by module, in the order of the files.

    Raises:
        RequestError: this Python comes without the library's sources.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    missing = [name for name in MODULES if not (folder / f"{name}.py").is_file()]
    if missing:
        raise RequestError(f"task: {folder} has no source of {', '.join(missing)}", "task")
    texts = ((folder / f"{name}.py").read_text(encoding="utf-8") for name in MODULES)
    return [list(_functions(text)) for text in texts]


def _functions(module: str) -> Iterator[str]:
    tree, lines = ast.parse(module), module.splitlines(keepends=True)
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    for node in [own for parent in (tree, *classes) for own in parent.body]:
        if isinstance(node, ast.FunctionDef):
            yield textwrap.dedent("".join(lines[node.lineno - 1 : node.end_lineno]))


def renamed(source: str) -> Edit | None:
    """Rename the variable of a function that is there most often; None where none is often there.

    One whose name is also an attribute's, an argument's in a call or in an f-string keeps it, as do
    `self` and `cls`.
    """
    nodes = list(ast.walk(ast.parse(source)))
    names = Counter(node.id for node in nodes if isinstance(node, ast.Name))
    able = _own_variables(nodes)
    old = next((n for n, count in names.most_common() if n in able and count >= LEAST), None)
    new = next((name for name in NAMES if name not in source), None)
    if old is None or new is None:
        return None
    lines = source.splitlines(keepends=True)
    for word in reversed(list(tokenize.generate_tokens(io.StringIO(source).readline))):
        if word.type == tokenize.NAME and word.string == old:
            (row, start), (_, end) = word.start, word.end
            lines[row - 1] = lines[row - 1][:start] + new + lines[row - 1][end:]
    return Edit(old, new, "".join(lines))


def _own_variables(nodes: Sequence[ast.AST]) -> set[str]:
    """Parameters and variables of a function that have nobody else's name."""
    stored = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    stored |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    others = {"self", "cls"} | {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    others |= {node.arg or "" for node in nodes if isinstance(node, ast.keyword)}
    strings = [node for node in nodes if isinstance(node, ast.JoinedStr)]
    inside = (node for string in strings for node in ast.walk(string))
    return stored - others - {node.id for node in inside if isinstance(node, ast.Name)}
