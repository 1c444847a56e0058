"""A step on a GPU, planned on the host: its size, and its arrays as one block of bytes.

Who executes a plan looks at nothing else: no slice, no sequence, no table of blocks.

Rows of a padded step that stand for no sequence have length 0, are written nowhere and keep their
tokens at an index beyond the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from inference.gpu.fields import Shape, pack_fields
from inference.gpu.sizes import Draw, ScheduledSlice, Size, WholeSize, singles, whole_size
from inference.scheduling.blocks import BlockManager
from inference.scheduling.layout import lay_out

OF_TOKENS = ("ids", "positions", "slots", "batch_index")  # int64


@dataclass(frozen=True)
class StepPlan:
    """A step as the device is told of it.

    Attributes:
        size: Says which arrays there are, and of which shapes.
        block: The arrays: uint8 on the host.
    """

    size: Size | WholeSize
    block: Tensor


def plan_step(
    work: Sequence[ScheduledSlice],
    size: Size | None,
    blocks: BlockManager,
    width: int,
    spare: int,
    *,
    pinned: bool,
) -> StepPlan:
    """Plan a step.

    Args:
        work: Sequences of one token first.
        size: The size that it is padded to; None where it runs as it is.
        blocks: Which blocks of the cache each sequence holds.
        width: Most blocks of a sequence.
        spare: The batch index of rows that stand for no sequence.
        pinned: Whether the arrays are to be moved without waiting.
    """
    if size is None:
        whole, values = whole_size(work), whole_values(work, blocks)
        return StepPlan(whole, pack_fields(step_shapes(whole, width), values, pinned=pinned))
    values = padded_values(work, size, blocks, spare)
    return StepPlan(size, pack_fields(step_shapes(size, width), values, pinned=pinned))


def step_shapes(size: Size | WholeSize, width: int) -> dict[str, Shape]:
    """Types and shapes of a step's arrays, for sequences of so many blocks at most."""
    if isinstance(size, Size):
        return padded_shapes(size, width)
    return {
        **shapes_of(size.tokens, size.sequences, size.samples, width),
        "rows": (torch.int64, (size.rows,)),
        "samples": (torch.int64, (size.samples,)),
        "query_start": (torch.int32, (size.sequences + 1,)),
    }


def shapes_of(tokens: int, sequences: int, samples: int, width: int) -> dict[str, Shape]:
    """Types and shapes of what every step has."""
    return {
        **dict.fromkeys(OF_TOKENS, (torch.int64, (tokens,))),
        "tables": (torch.int32, (sequences, width)),
        "lengths": (torch.int32, (sequences,)),
        "sample_index": (torch.int64, (samples,)),
        "temperature": (torch.float32, (samples,)),
        "top_p": (torch.float32, (samples,)),
        "top_k": (torch.int32, (samples,)),
        "seeds": (torch.int64, (samples,)),
        "steps": (torch.int64, (samples,)),
    }


def padded_shapes(size: Size, width: int) -> dict[str, Shape]:
    """Types and shapes of a padded step's arrays; of its prompts' too where it has any."""
    shapes = shapes_of(size.decodes + size.tokens, size.sequences, size.sequences, width)
    if size.prompts:
        shapes["rows"] = (torch.int64, (size.sequences,))
        shapes["query_start"] = (torch.int32, (size.sequences + 1,))
    return shapes


def padded_values(
    work: Sequence[ScheduledSlice], size: Size, blocks: BlockManager, spare: int
) -> dict[str, Sequence]:
    """What a padded step's arrays hold; the sample of work[i] is in row `places(work, size)[i]`.

    Args:
        work: Sequences of one token first.
        size: From `size_of`, or one at least as large.
        blocks: Which blocks of the cache each sequence holds.
        spare: The batch index of rows that stand for no sequence.
    """
    ones = singles(work)
    missing, absent = size.decodes - ones, size.prompts - (len(work) - ones)

    def spread(values: Sequence, blank: Any) -> list:
        """Room for the sequences of one token that there are not."""
        return [*values[:ones], *[blank] * missing, *values[ones:]]

    blank = {"slots": -1, "batch_index": spare, "tables": ()}
    own = {name: spread(v, blank.get(name, 0)) for name, v in _of_slices(work, blocks).items()}
    own["slots"] += [-1] * (size.decodes + size.tokens - len(own["slots"]))
    counts = [w.part.count for w in work[ones:]]
    starts = [*range(size.decodes), *accumulate(counts, initial=size.decodes)]
    found: dict[str, Sequence] = {
        **own,
        "sample_index": [
            *spread([w.index if w.samples else spare for w in work], spare),
            *[spare] * absent,
        ],
        **draws_of(spread([w.draw for w in work], Draw())),
    }
    if size.prompts:
        found["rows"] = [*range(size.decodes), *(start - 1 for start in starts[size.decodes + 1 :])]
        found["query_start"] = starts + [starts[-1]] * absent
    return found


def places(work: Sequence[ScheduledSlice], size: Size | WholeSize) -> list[int]:
    """The row of each one's next token among those that a step of a size gives."""
    if isinstance(size, WholeSize):
        return [*accumulate((int(w.samples) for w in work), initial=0)][:-1]
    ones = singles(work)
    return [i if i < ones else i - ones + size.decodes for i in range(len(work))]


def whole_values(work: Sequence[ScheduledSlice], blocks: BlockManager) -> dict[str, Sequence]:
    """What the arrays of a step as it is hold."""
    starts = [0, *accumulate(w.part.count for w in work)]
    rows, samples = [], []
    for w, end in zip(work, starts[1:], strict=True):
        rows += range(end - w.rows, end)
        if w.samples:
            samples.append(len(rows) - 1)
    sampling = [w for w in work if w.samples]
    return {
        **_of_slices(work, blocks),
        **draws_of([w.draw for w in sampling]),
        "rows": rows,
        "samples": samples,
        "sample_index": [w.index for w in sampling],
        "query_start": starts,
    }


def draws_of(draws: Sequence[Draw]) -> dict[str, Sequence]:
    """How tokens are chosen, by name."""
    return {
        "temperature": [draw.temperature for draw in draws],
        "top_p": [draw.top_p for draw in draws],
        "top_k": [draw.top_k for draw in draws],
        "seeds": [draw.seed for draw in draws],
        "steps": [draw.step for draw in draws],
    }


def _of_slices(work: Sequence[ScheduledSlice], blocks: BlockManager) -> dict[str, Sequence]:
    """Where tokens stand, and the tables of their sequences."""
    own = lay_out([w.part for w in work], blocks)
    return {
        "ids": own.ids,
        "positions": own.positions,
        "slots": own.slots,
        "batch_index": [w.index for w in work for _ in range(w.part.count)],
        "tables": own.tables,
        "lengths": own.contexts,
    }
