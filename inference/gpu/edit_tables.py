"""Biases and masks on the device, where steps find them; only what is new is moved there.

A sequence's biases are written to the row of its place when it gets it. Masks change with every
token: those of a step's constrained sequences, and after each of their drafts, are moved before
it, and no others, to the first rows. Since a mask needs the token before it, steps with masks never
overlap.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inference.scheduling.batch import Ints, RunningBatch
from inference.scheduling.sequence import MASKED_DRAFTS, MOST_EDITS
from inference.scheduling.work import Work
from kernels.triton.sampling.logits import LISTED, Edits

assert MOST_EDITS == LISTED


@dataclass(frozen=True)
class NewEdits:
    """What a step needs that is not on the device.

    Attributes:
        places: Rows of biases that are new.
        tokens: int32 [places, LISTED].
        values: fp32 [places, LISTED].
        masks: int32 [masks, ceil(vocabulary / 32)], on the host, pinned where it is moved.
    """

    places: Ints
    tokens: Tensor
    values: Tensor
    masks: Tensor | None


class EditTables:
    """The tables of a runner.

    Args:
        batch: The sequences.
        device: Where the tables are.
        pinned: Whether what goes there is moved without waiting.
    """

    def __init__(self, batch: RunningBatch, device: torch.device, *, pinned: bool) -> None:
        self._device, self._pinned = device, pinned
        self._mask_rows = len(batch.names) + MASKED_DRAFTS
        shape = (len(batch.names), LISTED)
        self._tokens = torch.zeros(shape, dtype=torch.int32, device=device)
        self._values = torch.zeros(shape, dtype=torch.float32, device=device)
        self._masks: Tensor | None = None  # how wide, the first step or mask tells
        self._staged: Tensor | None = None
        self._listed = np.full(len(batch.names), -1, np.int64)  # whose biases are there

    def new_for(self, work: Work) -> NewEdits | None:
        """What a step needs that is not there; None where that is nothing."""
        batch, owners = work.batch, work.places
        masks = self._masks_of(work) if work.masked.any() else None
        biased = batch.terms.bias_spans[owners].any(axis=(1, 2))
        new = biased & (self._listed[owners] != work.serials)
        if masks is None and not new.any():
            return None
        places = np.unique(owners[new])
        tokens = np.zeros((len(places), LISTED), np.int32)
        values = np.zeros((len(places), LISTED), np.float32)
        for row, place in enumerate(places.tolist()):
            sequence = batch.sequences[place]
            assert sequence is not None
            biases = sequence.terms.biases
            assert biases is not None
            tokens[row, : len(biases.tokens)] = biases.tokens
            values[row, : len(biases.values)] = biases.values
        return NewEdits(places, torch.from_numpy(tokens), torch.from_numpy(values), masks)

    def put(self, new: NewEdits) -> None:
        """Move what is new to the device, before the step that needs it."""
        for row, place in enumerate(new.places.tolist()):
            self._tokens[place].copy_(new.tokens[row])
            self._values[place].copy_(new.values[row])
        if new.masks is not None:
            masks = self._masks_on_device(new.masks.shape[1])
            masks[: len(new.masks)].copy_(new.masks, non_blocking=True)

    def note(self, work: Work, new: NewEdits) -> None:
        """Remember whose biases are there now."""
        self._listed[new.places] = work.batch.serial[new.places]

    def of(self, x: Mapping[str, Tensor], vocabulary: int) -> Edits:
        """The edits of a step's rows, as its fields say."""
        return Edits(
            self._tokens,
            self._values,
            self._masks_on_device(-(-vocabulary // 32)),
            lists=x["sample_index"],
            starts=x["bias_start"],
            ends=x["bias_end"],
            mask_rows=x["mask_row"],
        )

    def _masks_of(self, work: Work) -> Tensor:
        """The masks of a step's sequences, and of their drafts, one after the other."""
        batch, masks = work.batch, list[NDArray[np.int32]]()
        owners, starts = work.places[work.masked], work.starts[work.masked]
        firsts = np.flatnonzero(np.diff(owners, prepend=-1))  # rows of a sequence are side by side
        for first, end in pairwise([*firsts.tolist(), len(owners)]):
            place, start = int(owners[first]), int(starts[first]) + 1
            sequence = batch.sequences[place]
            assert sequence is not None
            assert sequence.next_masks is not None
            drafts = batch.ids[place, start : start + end - first - 1].tolist()
            masks += sequence.next_masks(drafts)
        if self._staged is None:
            shape = (self._mask_rows, len(masks[0]))
            self._staged = torch.empty(shape, dtype=torch.int32, pin_memory=self._pinned)
        staged = self._staged[: len(masks)]
        np.stack(masks, out=staged.numpy())
        return staged

    def _masks_on_device(self, words: int) -> Tensor:
        if self._masks is None:
            shape = (self._mask_rows, words)
            self._masks = torch.zeros(shape, dtype=torch.int32, device=self._device)
        return self._masks
