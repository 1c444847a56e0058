"""What runs in a step on a GPU, and the size that it is padded to.

A step whose number of tokens is small is padded, so that a CUDA graph captured for one serves many:
first the sequences of one token, as many as the next power of two; then, in a step that has others,
`PROMPTS` sequences of `Size.tokens` tokens together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from inference.scheduling.scheduler import Slice

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


def whole_size(work: Sequence[ScheduledSlice]) -> WholeSize:
    """The size of a step as it is."""
    return WholeSize(
        decodes=singles(work),
        sequences=len(work),
        tokens=sum(w.part.count for w in work),
        rows=sum(w.rows for w in work),
        samples=sum(w.samples for w in work),
    )


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
