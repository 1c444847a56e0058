"""Ways in which a checkpoint folder can be damaged, drawn at random from a seed.

`damage(folder, random)` changes one file of a folder, and says what it did. Files of JSON get other
values, keys and bytes; safetensors files other headers, elements and lengths; any file may go, or
become something that is no file.
"""

import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

DEEP = b"[" * 100_000
VALUES: list[Any] = [
    *(None, True, False, 0, 1, 2, -1, -4, -128, 3, 7, 96, 2**31 - 1, 2**31, 2**63, 10**30),
    *(0.0, -0.5, 0.5, 1e-30, 1e300, float("nan"), float("inf"), -float("inf")),
    *("", "x", "two", "4", "re:(", "re:.*", "lm_head", "\ud800", "a\0b", "../x", "/dev/zero"),
    *(
        [],
        [1],
        [[]],
        ["x"],
        [None],
        [2**70],
        {},
        {"a": 1},
        {"dtype": "int8"},
        {"rope_type": "yarn"},
    ),
]
KEYS = ["", "x", "\ud800", "auto_map", "quantization_config", "ptq", "head_dim", "rope_scaling"]
KEYS += ["sliding_window", "layer_types", "tokenizer_class", "chat_template", "pruned_heads"]
STRANGERS = ["added_tokens.json", "special_tokens_map.json", "vocab.json", "merges.txt"]
STRANGERS += ["generation_config.json", "tokenizer.model", "processor_config.json", "x.safetensors"]
STRANGERS += ["chat_template.jinja", "model.safetensors.index.json", "pytorch_model.bin", "x.gguf"]
STRANGERS += ["adapter_config.json", "quant/x.json", "quantize_config.json", "params.json"]


def damage(folder: Path, random: Random) -> str:
    """Damage one file of a folder; says which and how."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and not p.is_symlink())
    if random.random() < 0.05:
        path = folder / random.choice(STRANGERS)
        path.write_bytes(random.choice([b"", b"{}", b"[]", DEEP, random.randbytes(40)]))
        return f"added {path.name}"
    weights = [1 + 5 * (path.name == "config.json") for path in files]
    path = random.choices(files, weights)[0]
    kinds: list[Callable[[Path, Random], str]] = [change_bytes, change_file]
    if path.suffix == ".json":
        kinds += [change_json] * 6
    if path.suffix == ".safetensors":
        kinds += [change_header] * 4 + [change_elements] * 2
    kind = random.choice(kinds)
    try:
        done = kind(path, random)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        done = change_bytes(path, random)  # it is damaged already, and no document any more
    return f"{path.relative_to(folder)}: {done}"


def change_bytes(path: Path, random: Random) -> str:
    """Flip, cut, repeat or insert bytes."""
    data = bytearray(path.read_bytes())
    place = random.randrange(len(data)) if data else 0
    near = random.randrange(min(len(data), 64)) if data else 0
    at = random.choice([place, near])
    how = random.choice(["flip", "flip", "cut", "insert", "repeat", "empty", "deep", "mark"])
    if how == "flip" and data:
        data[at] ^= 1 << random.randrange(8)
    elif how == "cut":
        del data[at:]
    elif how == "insert":
        data[at:at] = random.randbytes(random.choice([1, 8, 100]))
    elif how == "repeat":
        data += data[at:]
    elif how == "mark":
        data[0:0] = b"\xef\xbb\xbf"
    else:
        data = bytearray(DEEP if how == "deep" else b"")
    path.write_bytes(data)
    return f"{how} at {at}"


def change_file(path: Path, random: Random) -> str:
    """Remove a file or its folder, or put something else there."""
    how = random.choice(["gone", "folder", "pipe", "circle", "nowhere", "out", "device", "other"])
    if how == "gone" and path.parent.name == "quant" and random.random() < 0.5:
        shutil.rmtree(path.parent)
        return "gone with its folder"
    others = [p for p in path.parent.iterdir() if p.is_file() and p != path]
    data = path.read_bytes()
    path.unlink()
    if how == "folder":
        path.mkdir()
    elif how == "pipe":
        os.mkfifo(path)
    elif how == "circle":
        path.symlink_to(path.name)
    elif how == "nowhere":
        path.symlink_to("gone")
    elif how == "out":
        outside = path.parents[2] / "outside"
        outside.write_bytes(data)
        path.symlink_to(outside)
    elif how == "device":
        path.symlink_to(random.choice(["/dev/zero", "/dev/null", "/proc/self/mem"]))
    elif how == "other" and others:
        shutil.copy(random.choice(others), path)
    return how


def change_json(path: Path, random: Random) -> str:
    """Change a value or a key anywhere in a document."""
    document = json.loads(path.read_bytes())
    done = _change(document, random)
    path.write_text(json.dumps(document))
    return done


def change_header(path: Path, random: Random) -> str:
    """Change a tensor's row of a header, so that header and data may still fit."""
    header, data = _split(path)
    names = [name for name in header if name != "__metadata__"]
    name = random.choice(names)
    row = header[name]
    how = random.choice(["any", "any", "shape", "dtype", "rename", "drop", "swap", "length"])
    if how == "any":
        how = _change(header, random)
    elif how == "shape":
        shape = row["shape"]
        turned = [
            shape[::-1],
            [*shape, 1],
            [1, *shape],
            [-n for n in shape],
            [float(n) for n in shape],
        ]
        row["shape"] = random.choice([*turned, [], [0], [2**40, 2**40], "x"])
    elif how == "dtype":
        row["dtype"] = random.choice(["U8", "I8", "F8_E4M3", "F16", "BF16", "I32", "F32", "I4", 7])
    elif how == "rename":
        other = random.choice(
            [name + "x", "\ud800", "", random.choice(names), name.upper(), "a\0b"]
        )
        header[other] = header.pop(name)
    elif how == "drop":
        _drop(header, name)
        begin, end = row["data_offsets"]
        data = data[:begin] + data[end:]
    elif how == "swap":
        other = random.choice(names)
        header[name], header[other] = header[other], header[name]
    text = json.dumps(header).encode()
    length = random.choice([0, 2**62, len(text) + 1]) if how == "length" else len(text)
    path.write_bytes(struct.pack("<Q", length) + text + data)
    return f"{how} of {name}"


def change_elements(path: Path, random: Random) -> str:
    """Give a tensor elements that are NaN, infinite, zero, negative or huge."""
    header, data = _split(path)
    names = [name for name in header if name != "__metadata__"]
    name = random.choice([name for name in names if name.endswith("scale")] or names)
    name = random.choice([name, random.choice(names)])
    begin, end = header[name]["data_offsets"]
    kind = random.choice(["nan", "inf", "zero", "negative", "huge", "noise"])
    word = {"nan": b"\0\0\xc0\x7f", "inf": b"\0\0\x80\x7f", "zero": b"\0\0\0\0"}
    word |= {"negative": b"\0\0\x80\xbf", "huge": b"\0\0\x7f\x7f"}
    length = random.choice([end - begin, min(4, end - begin)])
    changed = bytearray(data)
    fill = (
        random.randbytes(length) if kind == "noise" else (word[kind] * (length // 4 + 1))[:length]
    )
    changed[begin : begin + length] = fill
    head = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head + bytes(changed))
    return f"{kind} in {name}"


def _split(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:start]), data[start:]


def _drop(header: dict[str, Any], name: str) -> None:
    begin, end = header.pop(name)["data_offsets"]
    for other, row in header.items():
        if other != "__metadata__" and row["data_offsets"][0] >= end:
            row["data_offsets"] = [offset - (end - begin) for offset in row["data_offsets"]]


def _places(document: Any) -> Iterator[tuple[Any, Any]]:
    """Every value of a document, as what holds it and its key or index there."""
    if isinstance(document, dict | list):
        keys = list(document) if isinstance(document, dict) else range(len(document))
        for key in keys:
            yield document, key
            yield from _places(document[key])


def _change(document: Any, random: Random) -> str:
    places = list(_places(document))
    if not places:
        return "nothing"
    top = [place for place in places if place[0] is document]
    holder, key = random.choice(random.choice([top, places]))
    value, how = (
        holder[key],
        random.choice(["value", "value", "value", "near", "gone", "add", "wrap"]),
    )
    if how == "near" and isinstance(value, int | float) and not isinstance(value, bool):
        new = random.choice([value + 1, value - 1, value * 2, -value, value / 2, str(value)])
        holder[key] = new
    elif how == "gone":
        del holder[key]
    elif how == "add" and isinstance(holder, dict):
        holder[random.choice(KEYS)] = random.choice(VALUES)
    elif how == "wrap":
        holder[key] = random.choice([[value], {"x": value}, [value, value]])
    else:
        how, holder[key] = "value", random.choice(VALUES)
    return f"{how} of {key!r}, was {str(value)[:40]!r}, is {str(holder.get(key) if isinstance(holder, dict) else '')[:40]!r}"
