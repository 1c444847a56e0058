"""Drafts of which as many are accepted as is asked for: for models whose weights are random.

Requests of a load with a token are biased so strongly that it alone is chosen (`Load.token`). Each
draft is that token with the chance p, and another one else: d drafts then give a sequence

    1 + p + p^2 + ... + p^d

tokens a step on average. The engine proposes and verifies them as any others, and the tokens stay
the same.
"""

from __future__ import annotations

import numpy as np

from formats.errors import RequestError
from inference.scheduling.batch import Ints, RunningBatch

SEED = 0
TOKEN = 1  # that is chosen; any would do
USUAL = 4  # drafts


def chance_of(acceptance: float, depth: int | None) -> float:
    """The chance p with which drafts are to be right.

    Args:
        acceptance: Tokens of a sequence in a step, on average.
        depth: Drafts of it in each step; where they are as many as pay (None), `USUAL` would give
            so many tokens.

    Raises:
        RequestError: so many drafts cannot give so many tokens.
    """
    depth = USUAL if depth is None else depth
    if not 1 <= acceptance <= depth + 1:
        raise RequestError(
            f"--acceptance: found {acceptance:g} tokens a step; {depth} drafts give from 1 to "
            f"{depth + 1}",
            "acceptance",
        )
    low, high = 0.0, 1.0
    for _ in range(50):
        p = (low + high) / 2
        low, high = (p, high) if sum(p**i for i in range(depth + 1)) < acceptance else (low, p)
    return high


class Oracle:
    """Drafts of outputs of one token; see `inference.proposers.Proposer`.

    Args:
        token: The one that comes.
        chance: With which a draft is right.
    """

    def __init__(self, token: int, chance: float) -> None:
        self._token, self._chance = token, chance
        self._random = np.random.default_rng(SEED)

    def propose(self, batch: RunningBatch, places: Ints, most: Ints) -> Ints:
        """See `Proposer.propose`."""
        position = np.arange(int(most.max()))
        right = self._random.random((len(places), len(position))) < self._chance
        draft = np.where(right, self._token, self._token - 1)
        rows, within = np.nonzero(position < most[:, None])
        batch.ids[places[rows], batch.known[places[rows]] + within] = draft[rows, within]
        return most

    def note_end(self, tokens: object, prompt: int) -> None:
        """Nothing: all is known."""
