"""Which families there are: every module of `formats.families.declared` declares one."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from formats.errors import CheckpointError, suggestion
from formats.families import declared
from formats.families.family import Attention, Family
from formats.families.predicting import UNDECLARED, Predicting
from formats.families.sizes import size_in


def _collect() -> tuple[Family, ...]:
    names = sorted(module.name for module in pkgutil.iter_modules(declared.__path__))
    found = (importlib.import_module(f"{declared.__name__}.{name}") for name in names)
    return tuple(module.FAMILY for module in found)


FAMILIES = _collect()
BY_TYPE: Mapping[str, Family] = {kind: family for family in FAMILIES for kind in family.model_types}
CAUSAL = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES = OrderedDict("
MOST_LAYERS, BLOCKS = 10_000, "num_hidden_layers"
NUMBERED = re.compile(r"model\.layers\.(\d+)\.")
MODEL_TYPES = tuple(BY_TYPE)
DOCUMENT = Path(__file__).parent / "README.md"
COLUMNS = ("family", "smoothing", "CPU", "GPU", "cache", "transformers", "vLLM")
BEGIN, END = "<!-- families -->", "<!-- end -->"
OWN_CLASSES = {"llama_alibi": "formats.modeling.llama_alibi"}
"""Modules that register classes of models that are ours, for what transformers has no class of."""


def find_family(config: Mapping[str, Any]) -> Family | None:
    """The family that config.json names; None where there is no declaration of it."""
    return BY_TYPE.get(str(config.get("model_type")))


def is_ours(config: Mapping[str, Any]) -> bool:
    """Whether transformers has no class of a model, and what computes it is registered here."""
    kind, family = str(config.get("model_type")), find_family(config)
    return kind in OWN_CLASSES or bool(family and family.alike)


def family_of(config: Mapping[str, Any]) -> Family:
    """The family that config.json names.

    Raises:
        CheckpointError: there is no declaration of it.
    """
    family = find_family(config)
    if family is None:
        raise CheckpointError(f"config.json: {unsupported(config)}")
    return family


def unsupported(config: Mapping[str, Any], source: str = "") -> str:
    """Why a model without a declared family is refused, with what its model_type may stand for.

    Args:
        source: Where that is, if the message is to tell.
    """
    found, of = config.get("model_type"), f" of {source}" if source else ""
    if not isinstance(found, str):
        return f"found no model_type{of}; supported are {', '.join(MODEL_TYPES)}"
    text = f"model_type {found!r}{of} is not supported"
    if _known_to_transformers(found):  # no typing error, however close it is to one of ours
        text = f"{text} yet. transformers knows it; this project runs {', '.join(MODEL_TYPES)}"
    else:
        text = f"{text}; {suggestion(found, MODEL_TYPES)}"
    return f"{text}. `ptq families` tells what else is run, and by what"


def is_causal_lm(config: Mapping[str, Any]) -> bool:
    """Whether transformers lists a causal language model of config.json's type, or it is of ours.

    Of a family without a declaration it is found from transformers' own code, which may show that
    it is none that is run here (`formats.modeling`). Its list is read from the source.
    """
    return is_ours(config) or causal_class(config) is not None


def causal_class(config: Mapping[str, Any]) -> str | None:
    """Name of transformers' causal language model of config.json's type; None where it has none."""
    for text in _lists_of_transformers():
        listed = text.partition(CAUSAL)[2].partition("\n)\n")[0]
        entry = listed.partition(f'("{config.get("model_type")}", "')[2]
        if entry:
            return entry.partition('"')[0]
    return None


def _known_to_transformers(model_type: str) -> bool:
    """Whether transformers lists a family."""
    return any(f'("{model_type}", ' in text for text in _lists_of_transformers())


def _lists_of_transformers() -> Iterator[str]:
    """The source of transformers' lists of models: importing it takes seconds."""
    package = importlib.util.find_spec("transformers")
    folders = (package and package.submodule_search_locations) or ()
    lists = (file for folder in folders for file in Path(folder, "models", "auto").glob("*.py"))
    return (file.read_text(encoding="utf-8") for file in lists)


def block_names(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Full names of a model's decoder blocks, in their order.

    Raises:
        CheckpointError: config.json gives no number of blocks, or more than any model has.
    """
    count = size_in(config, BLOCKS)
    if count > MOST_LAYERS:
        raise CheckpointError(
            f"config.json: found {count} num_hidden_layers, at most {MOST_LAYERS}"
        )
    return tuple(f"model.layers.{i}" for i in range(count))


def attention_names(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Full names of the attention modules of a model's blocks, in their order."""
    family = find_family(config)
    attention = Attention() if family is None else family.attention
    return tuple(f"{block}.{attention.module}" for block in block_names(config))


def predicting_layer(config: Mapping[str, Any], name: str) -> str | None:
    """The layer that predicts further tokens which a module or tensor is in; None for others.

    Of families without a declaration these are `mtp` (Qwen3-Next, Qwen3.5), or numbered on after
    the last block.

    Returns:
        Full name of the layer.
    """
    family = find_family(config)
    if family is None and name.startswith(f"{UNDECLARED.module}."):
        return UNDECLARED.module
    own, blocks = Predicting() if family is None else family.predicting, config.get(BLOCKS)
    if own is None or not isinstance(blocks, int):
        return None
    listed, _, first = own.layer(blocks).rpartition(".")
    number, _, rest = name.removeprefix(f"{listed}.").partition(".")
    within = name.startswith(f"{listed}.") and number.isdigit() and bool(rest)
    return f"{listed}.{number}" if within and int(number) >= int(first) else None


def uncounted_blocks(config: Mapping[str, Any], names: Iterable[str]) -> tuple[str, ...]:
    """How names begin, of these tensors, that are of blocks which config.json does not count.

    Layers that predict further tokens are no such blocks.
    """
    counted, found = config.get(BLOCKS), (NUMBERED.match(name) for name in names)
    if not isinstance(counted, int):
        return ()
    after = {part[0]: int(part[1]) for part in found if part}
    more = (name for name, number in after.items() if number >= counted)
    return tuple(name for name in more if predicting_layer(config, f"{name}x") is None)


def numbered_on(config: Mapping[str, Any], name: str) -> str:
    """What vLLM calls a layer that predicts further tokens, or a module in it.

    Those of declared families are numbered on after the last block there, wherever files have them.
    """
    family = find_family(config)
    own = None if family is None else family.predicting
    if own is None or own.module is None or predicting_layer(config, f"{name}.weight") is None:
        return name
    listed, _, first = own.module.rpartition(".")
    number, dot, rest = name.removeprefix(f"{listed}.").partition(".")
    return Predicting().layer(size_in(config, BLOCKS) + int(number) - int(first)) + dot + rest


def predicting_patterns(config: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """`re:` patterns for all that is in the layers that predict further tokens, for `ignore`.

    Args:
        names: Of its tensors.
    """
    layers = {predicting_layer(config, name) for name in names} - {None}
    layers |= {numbered_on(config, layer) for layer in layers if layer is not None}
    return [rf"re:{re.escape(layer)}\." for layer in sorted(filter(None, layers))]


def read_table() -> list[dict[str, str]]:
    """What holds of each declared family: rows of a table, one a model type and one for all others.

    That of README.md is measured, not written: `python -m tests.families_table` makes it from tiny
    models of every declared type, and a test compares each row with what it finds.

    Returns:
        Cells by the names of `COLUMNS`.
    """
    text = DOCUMENT.read_text(encoding="utf-8")
    lines = text.partition(BEGIN)[2].partition(END)[0].strip().splitlines()[2:]
    cells = ([cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines)
    return [dict(zip(COLUMNS, row, strict=True)) for row in cells]


def with_table(rows: list[dict[str, str]]) -> str:
    """The document with other rows."""
    text = DOCUMENT.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    lines = [COLUMNS, tuple("---" for _ in COLUMNS)]
    lines += [(f"`{row['family']}`", *(row[c] for c in COLUMNS[1:])) for row in rows]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return f"{before}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}"
