"""Sequences at places of a batch, whose outputs are known, for proposers without an engine."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from inference.proposers import Proposer
from inference.scheduling.batch import RunningBatch
from inference.scheduling.sequence import Sequence as TokenSequence
from inference.scheduling.sequence import Terms

UNSEEN = 999  # is behind what is known, and no token of a test's


class Running:
    """A batch in which sequences gain tokens, and a proposer of its drafts."""

    def __init__(self, proposer: Any, places: int = 4) -> None:
        self.proposer, self.batch = proposer, RunningBatch(places)

    def enter(self, tokens: Sequence[int], reference: Sequence[int] = ()) -> TokenSequence:
        sequence = TokenSequence("", list(tokens), Terms(last=600))
        sequence.reference = list(reference)
        self.batch.enter(sequence)
        return sequence

    def draft(self, *sequences: TokenSequence, most: int = 4) -> list[list[int]]:
        """What is drafted for each; tells of a draft that is written beyond the most."""
        batch, places = self.batch, np.array([s.place for s in sequences])
        for place in places:
            batch.ids[place, batch.known[place] :] = UNSEEN
        known = batch.ids.copy()
        counts = self.proposer.propose(batch, places, np.full(len(places), most))
        drafts = []
        for place, count in zip(places.tolist(), counts.tolist(), strict=True):
            start = int(batch.known[place])
            drafts.append(batch.ids[place, start : start + count].tolist())
            known[place, start : start + most] = batch.ids[place, start : start + most]
        assert (batch.ids == known).all()
        assert counts.max() <= most
        return drafts


def steps(proposer: Proposer, prompt: list[int], output: list[int], most: int) -> int:
    """Steps until an output is there, whose tokens come with those of the drafts that are right."""
    running = Running(proposer)
    sequence = running.enter([*prompt, output[0]])
    done = count = 1
    while done < len(output):
        (draft,) = running.draft(sequence, most=most)
        wanted = output[done:]
        right = next((i for i, t in enumerate(draft) if wanted[i : i + 1] != [t]), len(draft))
        sequence.append(*wanted[: right + 1])
        done, count = done + right + 1, count + 1
    proposer.note_end(sequence.tokens, len(prompt))
    return count
