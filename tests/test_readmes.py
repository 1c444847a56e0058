"""The READMEs: every command parses, every link leads somewhere, every example is one."""

import ast
import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from inference.bench.command import MODES, steps_parser
from kernels.bench import command as kernels
from ptq.cli import COMMANDS
from ptq.recipe.own_model import shipped_recipes
from ptq.recipe.reading import load_recipe
from ptq.recipe.reference import anchor

ROOT = Path(__file__).parents[1]
PAGES = [
    page.relative_to(ROOT)
    for folder in (".", "calibrate", "formats", "inference", "kernels", "ptq", "recipes")
    for page in (ROOT / folder).glob("*.md" if folder == "." else "**/*.md")
]
CARD = Path("recipes/tiny-python/README.md")  # its example is of transformers
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def text_of(page: Path) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def commands() -> Iterator[tuple[Path, str]]:
    """Lines to paste that start our commands: indented by four, with what `\\` continues."""
    for page in PAGES:
        joined = re.sub(r" *\\\n *", " ", FENCE.sub("", text_of(page)))
        for line in re.findall(r"^    (\S.*)$", joined, re.MULTILINE):
            for command in line.split(" && "):
                if re.match(r"(ptq|python -m (ptq|inference)\S*) ", command):
                    yield page, command


def read(words: list[str]) -> None:
    """Hold a command against the parser that reads it, which ends the process where it refuses."""
    if "--" in words:  # what follows is for another program
        words = words[: words.index("--")]
    if words[:3] == ["python", "-m", "ptq"]:
        words = words[2:]
    if words[0] == "python":
        home, rest = words[2], words[3:]
        home = COMMANDS.get(home.removeprefix("ptq."), (home,))[0]
    else:
        home, rest = COMMANDS[words[1]][0], words[2:]
    if rest and rest[0] in MODES:
        readers = {"--kernels": kernels.parse_kernels, "--tune": kernels.parse_tune}
        readers.get(rest[0], steps_parser().parse_args)(rest[1:])
    else:
        importlib.import_module(home).parser().parse_args(rest)


@pytest.mark.parametrize(("page", "command"), list(commands()), ids=str)
def test_every_command_parses(page, command):
    try:
        read(shlex.split(command, comments=True))
    except SystemExit:
        pytest.fail(f"{page}: `{command}` is refused")


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_command_named_exists(page):
    named = re.findall(r"`ptq ([a-z][a-z-]*)\b", text_of(page))
    assert set(named) <= set(COMMANDS)


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_link_leads_to_a_file_and_a_heading(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", text_of(page))):
        if "://" in target:
            continue
        name, _, fragment = target.partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        assert path.exists(), f"{page}: no {target}"
        headings = re.findall(r"^#+ (.*)$", path.read_text() if fragment else "", re.MULTILINE)
        assert not fragment or fragment in map(anchor, headings), f"{page}: no {target}"


@pytest.mark.parametrize("page", [page for page in PAGES if page != CARD], ids=str)
def test_every_python_example_compiles_and_imports_what_there_is(page):
    for language, code in FENCE.findall(text_of(page)):
        if language != "python":
            continue
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom) and node.module:
                module = importlib.import_module(node.module)
                assert all(hasattr(module, alias.name) for alias in node.names)


@pytest.mark.parametrize("page", [Path("README.md"), Path("recipes/README.md")], ids=str)
def test_every_recipe_shown_is_one(page, tmp_path):
    for language, text in FENCE.findall(text_of(page)):
        if language == "yaml":
            path = tmp_path / "recipe.yaml"
            path.write_text(text)
            load_recipe(path, [f"model.path={ROOT / 'recipes/tiny-python'}"])


def test_every_command_has_its_row():
    rows = re.findall(r"^\| `ptq ([\w-]+)", text_of(Path("ptq/README.md")), re.MULTILINE)
    assert sorted(rows) == sorted(COMMANDS)


def test_every_shipped_recipe_is_told_of():
    text = text_of(Path("recipes/README.md"))
    untold = [name for recipe in shipped_recipes() if (name := f"`{recipe.name}`") not in text]
    assert not untold, f"recipes/README.md: give {', '.join(untold)} a row"
