"""What is counted and timed of an engine's requests; `inference.server.metrics` shows it."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

# Bounds as in vLLM, so that its dashboards show ours.
FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0)


INTER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5)


WHOLE = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0)


LENGTHS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))


class Histogram:
    """How many values lie up to each bound.

    Args:
        bounds: Ascending.

    Attributes:
        counts: Of values up to each bound and above the one before; the last has no bound.
        total: Sum of all values.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds, self.counts, self.total = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times


@dataclass
class Measures:
    """Sums since the start; times are seconds, as the HTTP process sees them.

    Attributes:
        prompt_tokens: Of prompts whose requests have their first token.
        generation_tokens: Tokens that arrived.
        finished: Requests that ended, by reason: `stop`, `length`, `error`, `abort` (their client
            left, or the server stopped) and `refused` (by the engine).
        overloaded: Requests that found the queue full.
        first_token: From a request's arrival to its first token.
        inter_token: Between two tokens of a request.
        whole: From a request's arrival to its end.
        prompt_lengths: Tokens of prompts.
        generation_lengths: Tokens of answers.
    """

    prompt_tokens: int = 0
    generation_tokens: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    overloaded: int = 0
    first_token: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN))
    inter_token: Histogram = field(default_factory=lambda: Histogram(INTER_TOKEN))
    whole: Histogram = field(default_factory=lambda: Histogram(WHOLE))
    prompt_lengths: Histogram = field(default_factory=lambda: Histogram(LENGTHS))
    generation_lengths: Histogram = field(default_factory=lambda: Histogram(LENGTHS))
