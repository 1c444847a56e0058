"""What others' kernels took on the same device, as measured once: `published_peers.json`.

vLLM's kernels cannot be called where the project runs, so that their times stand here as constants
with their source: microseconds of CUDA-graph replays, arguments rotated past the cache, as ours.
Where a peer quantizes its inputs in an op of its own, that op is part of its time; ours is then
compared with what quantizing adds to the op before it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kernels.bench.shapes import AttentionShape, Gemm, Shape

FILE = Path(__file__).with_name("published_peers.json")


@dataclass(frozen=True)
class Published:
    """A time of another's kernel.

    Attributes:
        us: Microseconds.
        kernel: Its name.
        quantizes: Whether quantizing the inputs is part of it.
    """

    us: float
    kernel: str
    quantizes: bool


@cache
def _devices() -> dict[str, Any]:
    return json.loads(FILE.read_text(encoding="utf-8"))


def source(device: str) -> str | None:
    """Where the times of a device come from; None where there are none."""
    return _devices().get(device, {}).get("source")


def published(device: str, shape: Shape) -> Published | None:
    """The fastest known of a shape, with results in bf16, on a device of that very name."""
    own = _devices().get(device)
    if own is None:
        return None
    if isinstance(shape, Gemm) and shape.dtype == "bfloat16":
        family, size, rows = shape.family, f"{shape.outputs}x{shape.inputs}", shape.rows
    elif isinstance(shape, AttentionShape) and shape.even and not shape.kind:
        family, rows = f"attention {shape.cache}", shape.new
        size = f"{shape.sequences}x{shape.context}"
    else:
        return None
    found = own["microseconds"].get(family, {}).get(size, {}).get(str(rows))
    if found is None:
        return None
    us, kernel = found
    return Published(us, kernel, family in own["quantization_included"])
