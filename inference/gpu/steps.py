"""What a step on a GPU is made of: slices of sequences, and their tensors.

A step whose number of tokens is small is padded, so that a CUDA graph captured for one serves many:
first the sequences of one token, as many as the next power of two; then, in a step that has others,
`PROMPTS` sequences of `Size.tokens` tokens together. Rows that stand for no sequence have length 0,
are written nowhere and keep their tokens at a seat of nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from inference.cpu.runner import lay_out
from inference.gpu.fields import Shape
from inference.models.kv_cache import BlockManager
from inference.scheduling.scheduler import Slice

OF_TOKENS = ("ids", "positions", "slots", "seats")  # int64
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
class Work:
    """A slice of a sequence, and what is wanted of it.

    Attributes:
        part: The slice.
        samples: Whether a token follows it; asked now, since the sequence grows meanwhile.
        seat: Where the sequence's last token is kept on the device.
        draw: How its next token is chosen.
        logits: Whether the host wants the logits of its last token.
        whole: Whether it wants those of all its tokens.
    """

    part: Slice
    samples: bool
    seat: int
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


def decodes_of(sequences: int) -> Size:
    """The size of a step of so many sequences of one token each."""
    return Size(_power(sequences))


def size_of(work: Sequence[Work]) -> Size | None:
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
        "sample_seats": (torch.int64, (samples,)),
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
    work: Sequence[Work], size: Size, blocks: BlockManager, nobody: int
) -> dict[str, Sequence]:
    """What a padded step's arrays hold; the sample of work[i] is in row `places(work, size)[i]`.

    Args:
        work: Sequences of one token first.
        size: From `size_of`, or one at least as large.
        blocks: Whose blocks are whose.
        nobody: The seat of rows that stand for no sequence.
    """
    ones = singles(work)
    missing, absent = size.decodes - ones, size.prompts - (len(work) - ones)

    def spread(values: Sequence, blank: Any) -> list:
        """Room for the sequences of one token that there are not."""
        return [*values[:ones], *[blank] * missing, *values[ones:]]

    blank = {"slots": -1, "seats": nobody, "tables": ()}
    own = {name: spread(v, blank.get(name, 0)) for name, v in _of_slices(work, blocks).items()}
    own["slots"] += [-1] * (size.decodes + size.tokens - len(own["slots"]))
    counts = [w.part.count for w in work[ones:]]
    starts = [*range(size.decodes), *accumulate(counts, initial=size.decodes)]
    found: dict[str, Sequence] = {
        **own,
        "sample_seats": [
            *spread([w.seat if w.samples else nobody for w in work], nobody),
            *[nobody] * absent,
        ],
        **draws_of(spread([w.draw for w in work], Draw())),
    }
    if size.prompts:
        found["rows"] = [*range(size.decodes), *(start - 1 for start in starts[size.decodes + 1 :])]
        found["query_start"] = starts + [starts[-1]] * absent
    return found


def places(work: Sequence[Work], size: Size) -> list[int]:
    """The row of each one's next token among those of a padded step."""
    ones = singles(work)
    return [i if i < ones else i - ones + size.decodes for i in range(len(work))]


def whole_values(
    work: Sequence[Work], blocks: BlockManager, width: int
) -> tuple[dict[str, Shape], dict[str, Sequence]]:
    """Types and shapes of the arrays of a step as it is, and what they hold."""
    counts = [w.part.count for w in work]
    starts = [0, *accumulate(counts)]
    rows, samples, seats = [], [], []
    for w, start in zip(work, starts[:-1], strict=True):
        if w.samples:
            samples.append(len(rows) + w.rows - 1)
            seats.append(w.seat)
        rows += range(start + w.part.count - w.rows, start + w.part.count)
    shapes = {
        **shapes_of(starts[-1], len(work), len(samples), width),
        "rows": (torch.int64, (len(rows),)),
        "samples": (torch.int64, (len(samples),)),
        "query_start": (torch.int32, (len(starts),)),
    }
    values = {"rows": rows, "samples": samples, "sample_seats": seats, "query_start": starts}
    draws = draws_of([w.draw for w in work if w.samples])
    return shapes, _of_slices(work, blocks) | draws | values


def draws_of(draws: Sequence[Draw]) -> dict[str, Sequence]:
    """How tokens are chosen, by name."""
    return {
        "temperature": [draw.temperature for draw in draws],
        "top_p": [draw.top_p for draw in draws],
        "top_k": [draw.top_k for draw in draws],
        "seeds": [draw.seed for draw in draws],
        "steps": [draw.step for draw in draws],
    }


def _of_slices(work: Sequence[Work], blocks: BlockManager) -> dict[str, Sequence]:
    """Where tokens stand, and the tables of their sequences."""
    own = lay_out([w.part for w in work], blocks)
    return {
        "ids": own.ids,
        "positions": own.positions,
        "slots": own.slots,
        "seats": [w.seat for w in work for _ in range(w.part.count)],
        "tables": own.tables,
        "lengths": own.contexts,
    }


def singles(work: Sequence[Work]) -> int:
    """How many are of one token."""
    return sum(w.part.count == 1 for w in work)


def _power(count: int) -> int:
    """The next power of two."""
    return 1 << (count - 1).bit_length()


def _rounded(tokens: int) -> int:
    """The next of 16, 32, 48, 64, 96, 128, 192, ...: powers of two and what lies halfway."""
    power = max(16, _power(tokens))
    return power * 3 // 4 if power > 32 and tokens <= power * 3 // 4 else power
