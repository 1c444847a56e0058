"""Why no other software opens a checkpoint, where none does, and how one is made for others."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from formats.families.registry import OWN_CLASSES
from formats.published.known import TURNED

CARD = "README.md"
FLOAT = "`ptq convert CHECKPOINT FLOAT --to float` makes a model of floats"


def only_here(config: Mapping[str, Any], *, quantized: bool, shares_head: bool) -> str | None:
    """Why only this runtime opens a checkpoint, and the setting that changes it; None for others.

    What others open and leave out, such as the scales of an int8 cache, is no such reason.

    Args:
        config: config.json.
        quantized: Whether weights of linear layers are.
        shares_head: Whether the quantized head is the embedding, too.
    """
    kind = str(config.get("model_type"))
    reasons = []
    if kind in OWN_CLASSES:
        reasons.append(
            f"transformers has no class of model_type {kind!r}, which no setting changes"
        )
    if quantized and kind in TURNED:
        reasons.append(
            f"the quantized layers of {kind} are Conv1D in transformers, which leaves these random "
            f"when it reads compressed-tensors. For others {FLOAT}"
        )
    if shares_head:
        reasons.append(
            "its quantized lm_head is the embedding, too, which others have no form for and refuse "
            "by its strategy tied_channel or tied_group. For others quantize with the method "
            "`untie` before the one that rounds, or leave lm_head in float (`ignore: "
            "[lm_head]`, or `--budget ... --target vllm`)"
        )
    return f"Only this runtime opens it: {'; '.join(reasons)}." if reasons else None


def said_in_card(folder: Path) -> str | None:
    """The reason that the card of a folder written here gives; None where it has none."""
    path = folder / CARD
    return path.read_text(encoding="utf-8").split("\n\n")[1] if path.is_file() else None


def card(reason: str) -> str:
    """The text of a checkpoint's card."""
    return f"# A checkpoint for this runtime alone\n\n{reason}\n\n    ptq serve FOLDER\n"
