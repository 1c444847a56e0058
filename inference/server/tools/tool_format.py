"""What a format of tool calls is, as data, and which there are."""

from __future__ import annotations

import importlib
import json
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes its calls: a JSON object each, with a name and with arguments.

    Attributes:
        name: As `--tool-format` spells it.
        marker: Text that announces a call, anywhere in an answer.
        arguments_key: Key of the arguments, beside `name`.
        opening: What the model is made to write before a call's JSON, where it has to call.
        closing: What then follows the JSON. White space around it is free where calls are read.
        separator: What then stands between two calls. Apart from white space it is required where
            calls follow one another without a marker.
        bare: An answer may also begin with a call that nothing announces.
    """

    name: str
    marker: str
    arguments_key: str
    opening: str
    closing: str
    separator: str
    bare: bool = False

    @property
    def joint(self) -> str:
        """What must stand between the JSON of two calls that share a marker; empty: nothing may."""
        return self.separator.strip()

    def begin(self, name: str) -> str:
        """The text of a call up to its arguments."""
        return f'{self.opening}{{"name": {json.dumps(name)}, "{self.arguments_key}": '

    @property
    def end(self) -> str:
        """The text of a call behind its arguments."""
        return "}" + self.closing


@cache
def tool_formats() -> Mapping[str, ToolFormat]:
    """All formats by name: each is a file of `declared`."""
    folder = Path(__file__).parent / "declared"
    names = sorted(module.name for module in pkgutil.iter_modules([str(folder)]))
    prefix = f"{__package__}.declared"
    found = [importlib.import_module(f"{prefix}.{name}").FORMAT for name in names]
    return {made.name: made for made in found}
