"""What runs in a step on a GPU, and the size that it is padded to.

A step whose number of tokens is small is padded, so that a CUDA graph captured for one serves many:
first the sequences of one token, as many as the next power of two (or, in a step of more than 32 of
them and nothing else, what is halfway); then, in a step that has others, `PROMPTS` sequences, or
`MANY`, of `Size.tokens` tokens together. A draft counts as a sequence of one token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from inference.scheduling.work import Work
from kernels.triton.tuning import halfway, power_of_two

PROMPTS = 8  # sequences of more than one token in a padded step
MANY = 64  # the same, where there are more of them than that
LEAST = 128  # tokens of so many
MOST_TOKENS = 2048  # of them; launching a step of more takes less than running it
LARGEST = 8192  # the same of small layers
LAUNCHED = 4e11  # bytes of a layer times tokens that run in 1.5 ms, which a host takes to launch it
ON_RANKS = 4  # times so many, where every sum over ranks waits for the slowest of several hosts


@dataclass(frozen=True)
class Size:
    """Rows of a padded step.

    Attributes:
        decodes: Sequences of one token.
        prompts: Sequences of more, after them; 0 if there are none.
        tokens: Of the latter.
        every: Whether the rows of all tokens are kept, of which the head reads some.
        adapted: Whether rows run with adapters.
        pieces: In a step of drafts of a model that keeps states, how many tokens a sequence has,
            and how many sequences there are; None in any other.
    """

    decodes: int
    prompts: int = 0
    tokens: int = 0
    every: bool = False
    adapted: bool = False
    pieces: tuple[int, int] | None = None

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
        adapted: Whether rows run with adapters.
    """

    decodes: int
    sequences: int
    tokens: int
    rows: int
    samples: int
    adapted: bool = False


def decodes_of(sequences: int) -> Size:
    """The size of a step of so many sequences of one token each."""
    return Size(halfway(sequences))


def drafts_of(sequences: int, drafts: int) -> Size:
    """The size of a step of so many sequences that keep states, with so many drafts at the most."""
    pieces = halfway(1 + drafts, beyond=2), power_of_two(sequences)
    return replace(decodes_of(pieces[0] * pieces[1]), pieces=pieces)


def most_tokens(layer_bytes: float | None, ranks: int = 1) -> int:
    """Tokens of prompts up to which steps are padded: a power of two, at which launching one kernel
    by kernel takes longer than running it.

    With 8,192 tokens, SmolLM2-135M's step took an H100 27 to 66 ms kernel by kernel, and that of
    Llama-3-8B's shape in a8w8 two H200s 117 to 132 ms, 72 as a graph.

    Args:
        layer_bytes: Of a rank's part of a layer; None where steps are not captured.
        ranks: How many there are.
    """
    if layer_bytes is None:
        return MOST_TOKENS
    launched = LAUNCHED * (ON_RANKS if ranks > 1 else 1)
    fits = max(1, int(launched / max(layer_bytes, 1)))
    return min(max(MOST_TOKENS, 1 << (fits.bit_length() - 1)), LARGEST)


def size_of(work: Work, most: int = MOST_TOKENS) -> Size | None:
    """The padded size of a step; None where it has more than `most` tokens of prompts, or more
    prompts than are padded."""
    decodes, prompts = work.singles, len(work) - work.singles
    if not prompts and work.samples.all() and not work.whole.any():
        return replace(decodes_of(decodes), adapted=work.adapted)
    tokens = work.tokens - decodes
    if prompts > MANY or tokens > most:
        return None
    every = bool((work.host | work.whole | (work.logprobs >= 0)).any())
    size = _size(power_of_two(decodes) if decodes else 0, prompts, tokens, every)
    return replace(size, adapted=work.adapted)


def _size(decodes: int, prompts: int, tokens: int, every: bool = False) -> Size:
    """The size of a step that has prompts."""
    if prompts <= PROMPTS:
        return Size(decodes, PROMPTS, _rounded(tokens), every)
    beside = 16 if decodes else 0
    while beside < decodes:
        beside *= 4
    return Size(beside, MANY, _rounded(max(tokens, LEAST)), every)


def padded_sizes(sequences: int, most: int, rows: int = 0) -> list[Size]:
    """Sizes of steps of up to so many decodes, of at most so many tokens of prompts, and of both.

    The largest come first: what they need of memory is enough for the others.

    Args:
        sequences: Most decodes.
        most: Most tokens of prompts.
        rows: Decodes and drafts of a step without prompts, where there are more of them.
    """
    alone = {decodes_of(n) for n in range(1, max(sequences, rows) + 1)}
    decodes = sorted({power_of_two(n) for n in range(1, sequences + 1)}, reverse=True)
    tokens = sorted({_rounded(n) for n in range(1, min(most, MOST_TOKENS) + 1)}, reverse=True)
    prompts = (PROMPTS, MANY) if sequences > PROMPTS else (PROMPTS,)
    both = {_size(d, s, t): None for t in tokens for s in prompts for d in (*decodes, 0)}
    return [*sorted(alone, key=lambda size: -size.decodes), *both]


def whole_size(work: Work) -> WholeSize:
    """The size of a step as it is."""
    return WholeSize(
        decodes=work.singles,
        sequences=len(work),
        tokens=work.tokens,
        rows=int(work.rows.sum()),
        samples=int(work.samples.sum()),
        adapted=work.adapted,
    )


def _rounded(tokens: int) -> int:
    """The next of 16, 32, 48, 64, 96, 128, 192, ...: powers of two and what is halfway."""
    return max(16, halfway(tokens))
