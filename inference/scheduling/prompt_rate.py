"""How many tokens of prompts a step has time for, by what past steps took."""

from __future__ import annotations

LEAST = 16  # tokens of prompts in a step, however late it is
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
        return max(LEAST, int((seconds - (self._decode_s or 0.0)) * self._rate))


def _mean(mean: float | None, value: float) -> float:
    if mean is None:
        return value
    return (1 - WEIGHT) * mean + WEIGHT * min(max(value, mean / 2), mean * 2)
