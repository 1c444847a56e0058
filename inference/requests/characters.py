r"""Classes of characters, such as `[a-zé]`, in an order in which xgrammar reads them as meant.

xgrammar 0.2 writes a character from U+007F to U+00FF by two hexadecimal digits, `\xe9`, and reads
as many as there are: of `[é1]` it makes U+0E91. So such a character stands last here, where no
digit follows. It also lets halves of surrogate pairs in, which are no UTF-8, for `.`, `[^a]`, `\S`
and ranges around them: they are left out here.
"""

from __future__ import annotations

import re

ITEM = r"(?:\\(?:x[0-9a-f]{2}|u[0-9a-fA-F]{4}|U[0-9a-f]{8}|.)|[^\\])"
CLASS = r"\[(?P<sign>\^?)(?P<items>(?:\\.|[^\]\\])+)\]"
RANGE = re.compile(rf"({ITEM})(?:-({ITEM}))?", re.DOTALL)
IN_PATTERNS = re.compile(rf"\\.|{CLASS}", re.DOTALL)
UNIT = r"(?:\\(?:u\{[0-9a-fA-F]+\}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.)|[^\\])"
UNITS = re.compile(rf"({UNIT})(?:-({UNIT}))?", re.DOTALL)
WIDE = re.compile(rf"{CLASS}|{UNIT}", re.DOTALL)
HALVES = r"\ud800-\udfff"
BEYOND = re.compile(r"\\?([^\x00-\x7e])|\\.", re.DOTALL)


def plain_pattern(pattern: str) -> str:
    """A regular expression that says the same, with its classes in order."""
    return IN_PATTERNS.sub(in_order, WIDE.sub(_without_halves, pattern))


def in_ascii(pattern: str) -> str:
    """A schema's pattern in ASCII: in others xgrammar lets a quote in for `.` and `[^a]`."""
    pattern = WIDE.sub(_without_halves, pattern)
    return BEYOND.sub(lambda one: f"\\u{{{ord(one[1]):x}}}" if one[1] else one[0], pattern)


def _without_halves(found: re.Match[str]) -> str:
    """What matches the same but for halves of surrogate pairs."""
    sign, items = found["sign"], found["items"]
    if items is None:
        wide = {".": "", r"\S": r"\s", r"\W": r"\w", r"\D": r"\d"}.get(found[0])
        return found[0] if wide is None else f"[^{HALVES}{wide}]"
    if sign:
        return f"[^{HALVES}{items}]" if items[0] != "-" else rf"[^{HALVES}\{items}]"
    ways, others = list[str](), ""
    for item in UNITS.finditer(items):
        low, high = item[1], item[2] or item[1]
        if item[0] in (r"\S", r"\W", r"\D"):
            ways.append(f"[^{HALVES}{item[0].lower()}]")
        elif _number(low) < 0xD800 and _number(high) > 0xDFFF:
            others += rf"{low}-\ud7ff\ue000-{high}"
        else:
            others += item[0]
    ways += [f"[{others}]"] if others else []
    return ways[0] if len(ways) == 1 else f"(?:{'|'.join(ways)})"


def _number(unit: str) -> int:
    """The number of a character as a pattern has it."""
    return int(unit[2:].strip("{}"), 16) if len(unit) > 2 else ord(unit[-1])


def in_order(found: re.Match[str]) -> str:
    """A class of characters in order, found by `CLASS`; anything else as it is."""
    if found["items"] is None:
        return found[0]
    first, last = [], []
    for item in RANGE.finditer(found["items"]):
        low, high = item[1], item[2] or item[1]
        if not 0x7F <= _code(high) <= 0xFF:
            first.append(item[0])
            continue
        if _code(low) < 0x7F:
            first.append(f"{low}-~")
            low = "\x7f"
        last.append(low if low == high else f"{low}-{high}")
    if not last:
        return found[0]
    end = first.pop() if first[-1:] == ["-"] else ""  # a dash between others makes a range
    return f"[{found['sign']}{''.join(first)}{''.join(last)}{end}]"


def _code(item: str) -> int:
    r"""The number of a character; of a class such as `\d`, that of its letter."""
    return int(item[2:], 16) if len(item) > 2 else ord(item[-1])
