"""Drafts of which as many come as is asked for: for models whose weights are random.

What a load generates is recorded without drafts. After that its own tokens are drafted, each with
the chance p of being right, and a wrong one else: a step of depth d then gives a sequence

    1 + p + p^2 + ... + p^d

tokens on average. Nothing in the engine knows of it, and the tokens stay the same.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from formats.errors import RequestError
from inference.bench.load import Load, ask
from inference.engine import Engine
from inference.scheduling.batch import Ints, RunningBatch

SEED = 0


def chance_of(acceptance: float, depth: int) -> float:
    """The chance p with which drafts are to be right.

    Args:
        acceptance: Tokens of a sequence in a step, on average.
        depth: Drafts of it in each step.

    Raises:
        RequestError: so many drafts cannot give so many tokens.
    """
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
    """Drafts of outputs that are known; see `inference.speculate.proposer.Proposer`.

    Args:
        outputs: Prompts and what followed them, as tokens.
        prompt: Tokens of each prompt.
        chance: With which a draft is right.
        vocabulary: Of the wrong ones.
    """

    def __init__(
        self, outputs: Sequence[Sequence[int]], prompt: int, chance: float, vocabulary: int
    ) -> None:
        self._outputs = {tuple(tokens[:prompt]): np.array(tokens, np.int32) for tokens in outputs}
        self._prompt, self._chance, self._vocabulary = prompt, chance, vocabulary
        self._random = random.Random(SEED)

    def propose(self, batch: RunningBatch, places: Ints, most: Ints) -> Ints:
        """See `Proposer.propose`."""
        counts = np.zeros_like(places)
        for i, (place, count) in enumerate(zip(places.tolist(), most.tolist(), strict=True)):
            known = int(batch.known[place])
            output = self._outputs[tuple(batch.ids[place, : self._prompt].tolist())]
            draft = output[known : known + count].copy()
            wrong = [j for j in range(len(draft)) if self._random.random() >= self._chance]
            draft[wrong] = (draft[wrong] + 1) % self._vocabulary
            batch.ids[place, known : known + len(draft)] = draft
            counts[i] = len(draft)
        return counts

    def note_end(self, tokens: Sequence[int], prompt: int) -> None:
        """Nothing: all is known."""


def fake_drafts(engine: Engine, load: Load, acceptance: float, depth: int) -> None:
    """Run a load without drafts, and have its outputs drafted from then on.

    Args:
        engine: Idle.
        load: What will be run.
        acceptance: Tokens of a sequence in a step, on average.
        depth: Drafts of it in each step.

    Raises:
        RequestError: so many drafts cannot give so many tokens.
        EngineError: the device's steps take no drafts.
    """
    chance = chance_of(acceptance, depth)
    engine.speculate_by(None)
    outputs = [[*output.prompt_token_ids, *output.token_ids] for output in ask(engine, load)]
    vocabulary = engine.model.config.vocab_size
    engine.speculate_by(Oracle(outputs, load.prompt_tokens, chance, vocabulary), depth)
