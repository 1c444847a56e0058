"""How the prompts of a step share its tokens.

One alone takes all, or half while it is long: a step that it is alone in is what the next to come
waits for. Of several the shortest comes first, so that a short prompt need not wait for a
long one; the one that has waited longest keeps half of the step's tokens, so that no stream of
short ones starves it. A step of short prompts that leave room it leaves to them: a step lasts as
long as its tokens, and theirs are waited for. In every other such step it takes all the room, which
gives it half of the time, too. For some steps after a shorter one was beside it, steps that a long
prompt is alone in are a sixteenth of a step, since who comes next waits for one of them.

An H200 that computes a prompt of 60,000 tokens of Llama-3-8B's shape (a8w8c8) gives others of 128
tokens, seven a second, their first token after a median of 10.7 ms (16 parts), 16.4 (8 parts), 27.7
(4) and 29.6 (none); alone it is 4.7. The long one takes 6.0, 5.0, 4.5 and 3.2 seconds.

`PromptRate` says how many tokens of prompts a step has time for, by what past steps took.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from inference.scheduling.states import whole_pieces
from inference.scheduling.work import Work

LEAST_TOKENS = 16  # tokens of prompts in a step, however late it is
FIRST = 64  # before anything was measured
WEIGHT = 0.3  # of the newest step


class PromptRate:
    """Learns from steps what decodes take, and how many tokens of prompts a second has beside them.

    A step is taken to last as long as one of its decodes alone, and as its tokens of prompts. Both
    are running means, in which no step counts for less than half or more than twice the mean: one
    that had to compile something says nothing of the next.
    """

    def __init__(self) -> None:
        self._decode_s: float | None = None
        self._rate: float | None = None  # tokens of prompts a second

    def note(self, decodes: int, tokens: int, seconds: float) -> None:
        """Learn from a step.

        Args:
            decodes: Sequences of one token.
            tokens: Of prompts.
            seconds: What the step took.
        """
        if tokens == 0:
            self._decode_s = _mean(self._decode_s, seconds)
        else:
            beside = (self._decode_s or 0.0) if decodes else 0.0
            own = max(seconds - beside, seconds / 10)  # a mean may be more than this step took
            self._rate = _mean(self._rate, tokens / own)

    def tokens_in(self, seconds: float) -> int:
        """How many tokens of prompts a step has time for beside its decodes; at least a few."""
        if self._rate is None:
            return FIRST
        return max(LEAST_TOKENS, int((seconds - (self._decode_s or 0.0)) * self._rate))


def _mean(mean: float | None, value: float) -> float:
    if mean is None:
        return value
    return (1 - WEIGHT) * mean + WEIGHT * min(max(value, mean / 2), mean * 2)


LEAST = 1024  # tokens of a chunk that attention would make smaller; fewer leave a large GPU idle
SHORT = 8192  # computed tokens; up to there no chunk is made smaller for attention
MANY = 4  # chunks; a prompt of more has steps half as long, so that who comes meanwhile waits less
FAST = 16  # parts of a step, of which a long prompt takes one where others may come soon
LEAST_FAST = 128  # tokens of such a part
SOON = 24  # steps after one that a long and a shorter prompt shared, in which others may come


class Prompt(NamedTuple):
    """What is left of a prompt.

    Attributes:
        arrival: Its place in the order of arrival.
        left: Tokens that are not computed.
        computed: Tokens that are.
        end: Where it ends; a sequence that gave way has tokens of its output after it.
    """

    arrival: int
    left: int
    computed: int
    end: int


class ChunkedPrefill:
    """Says how many tokens each prompt has in a step.

    Attributes:
        span: Attention to so many computed tokens takes as long as all else that a token needs.
            Beyond it a chunk is as much shorter as its tokens have more to attend to, so that a
            step of a long prompt's end takes little longer than others.
        target_s: Seconds that a step of some decodes and some prompts should take; None: no matter.
        beside_decodes: Most tokens of prompts in a step that has others; None: as many as fit.
    """

    def __init__(self, span: float, target_s: float | None) -> None:
        self.span, self.target_s, self._rate = span, target_s, PromptRate()
        self.beside_decodes: int | None = None
        self._yielded = False  # whether the oldest prompt let shorter ones by in the last step
        self._hurried = -1  # steps for which others are still expected beside a long prompt

    @property
    def hurried(self) -> bool:
        """Whether a shorter prompt was beside a long one in one of the last steps."""
        return self._hurried >= 0

    def note_time(self, work: Work, seconds: float) -> None:
        """Learn how long a step took, to choose how many tokens of prompts the next ones have."""
        assert self.target_s is not None
        self._rate.note(work.decodes, work.prompt_tokens, seconds)
        self.beside_decodes = rounded_down(self._rate.tokens_in(self.target_s))

    def shares(self, prompts: Sequence[Prompt], room: int, decodes: int, piece: int) -> list[int]:
        """Tokens of each prompt in the next step.

        Args:
            prompts: In any order.
            room: Most tokens of all of them.
            decodes: Sequences of one token in that step.
            piece: Tokens of a piece, where a model keeps a state; 0 where it keeps none.
        """
        tokens = room
        if decodes and self.beside_decodes is not None:
            tokens = min(room, self.beside_decodes)
        long = [is_long(prompt, tokens) for prompt in prompts]
        self._hurried = SOON if any(long) and not all(long) else max(-1, self._hurried - 1)
        self._yielded = len(prompts) > 1 and not self._yielded
        if piece:
            tokens = min(max(tokens, piece), room)
        own = self._shared(prompts, tokens)
        return in_pieces(prompts, own, tokens, piece) if piece else own

    def _shared(self, prompts: Sequence[Prompt], tokens: int) -> list[int]:
        """Tokens of each prompt, so many of all of them together at the most."""
        counts = [0] * len(prompts)
        if not prompts:
            return counts
        oldest = min(range(len(prompts)), key=lambda i: prompts[i].arrival)
        order = sorted(range(len(prompts)), key=lambda i: (prompts[i].left, prompts[i].arrival))
        kept = tokens // 2 if order[0] != oldest else 0
        room = tokens - kept
        for i in order:
            if i == oldest and kept:
                continue
            counts[i] = _chunk(prompts[i], room, self.span, self.hurried)
            room -= counts[i]
        if kept and not (self._yielded and room):
            counts[oldest] = _chunk(prompts[oldest], kept + room, self.span)
        return counts


def in_pieces(
    prompts: Sequence[Prompt], shares: Sequence[int], tokens: int, piece: int
) -> list[int]:
    """Shares that end no piece of a prompt too early, where a model keeps a state.

    Args:
        prompts: What comes after them has no pieces.
        shares: Tokens of each in the step.
        tokens: Of all of them together, at most.
        piece: Tokens of a piece.
    """
    own = [
        whole_pieces(p.computed, share, p.end, piece)
        for p, share in zip(prompts, shares, strict=True)
    ]
    room = tokens - sum(own)
    for i in sorted(range(len(own)), key=lambda i: prompts[i].arrival):
        at, end = prompts[i].computed, prompts[i].end
        first = 1 if at >= end else min((at // piece + 1) * piece, end) - at
        if not own[i] and first <= room:
            own[i], room = first, room - first
    return own


def is_long(prompt: Prompt, tokens: int) -> bool:
    """Whether a prompt has many steps of so many tokens before it, or has had them and goes on."""
    return prompt.left > MANY * tokens or (prompt.computed > MANY * tokens and prompt.left > LEAST)


def _chunk(prompt: Prompt, tokens: int, span: float, hurried: bool = False) -> int:
    """Tokens of a prompt where there is room for so many."""
    chunk, longest, least = tokens, max(span, SHORT), LEAST
    if hurried and is_long(prompt, tokens):
        chunk, least = tokens // FAST, LEAST_FAST
    elif prompt.left > MANY * tokens:
        chunk = tokens // 2
    if prompt.computed > longest:  # a power of two: what a GPU's attention has no idle rest at
        affordable = max(1, int(tokens * longest / prompt.computed))
        chunk = min(chunk, 1 << (affordable.bit_length() - 1))
    return min(prompt.left, max(chunk, min(least, tokens)))


def rounded_down(tokens: int) -> int:
    """The largest of 16, 32, 48, 64, 96, 128, 192, ... that is not more: sizes of GPUs' graphs."""
    if tokens < 16:
        return tokens
    power = 1 << (tokens.bit_length() - 1)
    return power * 3 // 2 if power >= 32 and tokens >= power * 3 // 2 else power
