"""A step on a GPU, planned on the host: its size, and its arrays as one block of bytes.

Who executes a plan looks at nothing else: no slice, no sequence, no table of blocks.

A step whose number of tokens is small is padded, so that a CUDA graph captured for one serves many:
first the sequences of one token, as many as the next power of two; then, in a step that has others,
`PROMPTS` sequences of `Size.tokens` tokens together. Rows that stand for no sequence have length 0,
are written nowhere and keep their tokens at an index beyond the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from inference.gpu.fields import Shape, pack_fields
from inference.scheduling.blocks import BlockManager
from inference.scheduling.layout import lay_out
from inference.scheduling.scheduler import Slice

OF_TOKENS = ("ids", "positions", "slots", "batch_index")  # int64
PROMPTS = 8  # sequences of more than one token in a padded step
MOST_TOKENS = 2048  # of them; launching a step of more takes less than running it


@dataclass(frozen=True)
class Draw:
    """How the next token of a sequence is chosen: see `kernels.triton.sampling.sample.sample`."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    step: int = 0


@dataclass(frozen=True)
class ScheduledSlice:
    """A slice of a sequence, and what is wanted of it.

    Attributes:
        part: The slice.
        samples: Whether a token follows it; asked now, since the sequence grows meanwhile.
        index: The sequence's place in the batch: where its last token is kept on the device.
        draw: How its next token is chosen.
        logits: Whether the host wants the logits of its last token.
        whole: Whether it wants those of all its tokens.
    """

    part: Slice
    samples: bool
    index: int
    draw: Draw = Draw()
    logits: bool = False
    whole: bool = False

    @property
    def rows(self) -> int:
        """Rows of logits that it needs."""
        return self.part.count if self.whole else int(self.samples)


@dataclass(frozen=True)
class Size:
    """Rows of a padded step.

    Attributes:
        decodes: Sequences of one token.
        prompts: Sequences of more, after them; 0 if there are none.
        tokens: Of the latter.
    """

    decodes: int
    prompts: int = 0
    tokens: int = 0

    @property
    def sequences(self) -> int:
        """Of one token and of more."""
        return self.decodes + self.prompts


@dataclass(frozen=True)
class WholeSize:
    """Rows of a step that runs as it is, never captured.

    Attributes:
        decodes: Sequences of one token, which come first.
        sequences: Sequences of one token and of more.
        tokens: Tokens of all of them.
        rows: Tokens whose logits are wanted.
        samples: Sequences that get a next token.
    """

    decodes: int
    sequences: int
    tokens: int
    rows: int
    samples: int


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


def decodes_of(sequences: int) -> Size:
    """The size of a step of so many sequences of one token each."""
    return Size(_power(sequences))


def size_of(work: Sequence[ScheduledSlice]) -> Size | None:
    """The padded size of a step; None where it is not to be padded.

    Args:
        work: Sequences of one token first.
    """
    decodes, tokens = singles(work), sum(w.part.count for w in work)
    if decodes == len(work) and all(w.samples and not w.whole for w in work):
        return decodes_of(decodes)
    prompts, tokens = len(work) - decodes, tokens - decodes
    if any(w.logits or w.whole for w in work) or prompts > PROMPTS or tokens > MOST_TOKENS:
        return None
    return Size(_power(decodes) if decodes else 0, PROMPTS, _rounded(tokens))


def prompt_sizes(most: int) -> list[Size]:
    """Sizes of steps of prompts alone, of at most so many tokens."""
    counts = range(1, min(most, MOST_TOKENS) + 1)
    return [Size(0, PROMPTS, tokens) for tokens in sorted({_rounded(n) for n in counts})]


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


def whole_size(work: Sequence[ScheduledSlice]) -> WholeSize:
    """The size of a step as it is."""
    return WholeSize(
        decodes=singles(work),
        sequences=len(work),
        tokens=sum(w.part.count for w in work),
        rows=sum(w.rows for w in work),
        samples=sum(w.samples for w in work),
    )


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


def singles(work: Sequence[ScheduledSlice]) -> int:
    """How many are of one token."""
    return sum(w.part.count == 1 for w in work)


def _power(count: int) -> int:
    """The next power of two."""
    return 1 << (count - 1).bit_length()


def _rounded(tokens: int) -> int:
    """The next of 16, 32, 48, 64, 96, 128, 192, ...: powers of two and what lies halfway."""
    power = max(16, _power(tokens))
    return power * 3 // 4 if power > 32 and tokens <= power * 3 // 4 else power
