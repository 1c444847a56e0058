"""KL divergence and perplexity of texts: both models side by side, a window at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from formats.errors import EngineError
from inference.accuracy import SequenceScores, compare_predictions
from ptq.certify.figures import PLACES, Row
from ptq.certify.setting import Pair, Setting
from ptq.certify.statistics import histogram

BLOCK = 256  # predictions of a long window that count as one case


@dataclass(frozen=True)
class Window:
    """Token ids of a piece of text.

    Attributes:
        long: Whether it is there for its late positions alone.
    """

    name: str
    kind: str
    ids: list[int]
    long: bool = False


def text_cases(setting: Setting) -> list[Window]:
    """Windows of every kind of text, and long ones."""
    level, found = setting.level, list[Window]()
    length = min(level.window, setting.length)
    longest = min(level.longest, setting.length)
    for kind in setting.texts:
        short = setting.windows(kind, level.windows, length, "windows")
        found += [Window(f"{kind} {i}", kind, ids) for i, ids in enumerate(short)]
        if longest > length:
            long = setting.windows(kind, level.long, longest, "long windows")
            found += [Window(f"{kind} long {i}", kind, ids, True) for i, ids in enumerate(long)]
    return found


def measure_text(pair: Pair, cases: Sequence[Window], bar: Any) -> list[list[Row]]:
    """Rows of each window: one of a short one, one for each `BLOCK` predictions of a long one."""
    found = []
    for window in cases:
        both = compare(pair, window.ids, window.name)
        found.append(_late(window, both) if window.long else [_row(window, both)])
        bar.update()
    return found


def compare(pair: Pair, ids: Sequence[int], name: str) -> SequenceScores:
    """What both models predict of a text; no more logits are held than of one step.

    Raises:
        EngineError: logits hold NaN or infinity.
    """
    targets, found, start = torch.tensor(ids[1:]), list[Tensor](), 0
    for p, q in zip(*(engine.score_parts(ids) for engine in pair), strict=True):
        count = min(len(p), len(targets) - start)
        if count:
            part = compare_predictions(p[:count], q[:count], targets[start : start + count])
            found.append(torch.stack([getattr(part, field.name) for field in fields(part)]))
        start += count
    both = SequenceScores(*torch.cat(found, dim=1))
    if not torch.isfinite(both.nll_original + both.nll_quantized + both.kl).all():
        raise EngineError(
            f"{name}: a model's logits hold NaN or infinity; check both with `ptq inspect`"
        )
    return both


def _row(window: Window, both: SequenceScores) -> Row:
    values = {"kl.mean": (0.0, both.kl.mean().item())}
    values[f"kl.{window.kind}"] = values["kl.mean"]
    for start, end in PLACES[:2]:
        if len(both.kl) > start:
            values |= _at(start, both.part(start, end))
    return Row(case=window.name, values=values, counts=histogram(both.kl.numpy()))


def _late(window: Window, both: SequenceScores) -> list[Row]:
    rows = []
    for start, end in PLACES[2:]:
        for first in range(start, min(end, len(both.kl)), BLOCK):
            part = both.part(first, min(first + BLOCK, end))
            name = f"{window.name} from {first}"
            rows.append(Row(case=name, values=_at(start, part), length=first))
    return rows


def _at(start: int, part: SequenceScores) -> dict[str, tuple[float, float]]:
    return {
        f"kl.at_{start}": (0.0, part.kl.mean().item()),
        f"perplexity.at_{start}": (
            part.nll_original.mean().item(), part.nll_quantized.mean().item()
        ),
    }  # fmt: skip
