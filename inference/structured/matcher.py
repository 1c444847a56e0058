"""Which tokens may come next in one output."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

import numpy as np


class GrammarMatcher:
    """Follows one output under a compiled grammar.

    Args:
        compiled: From xgrammar.
        words: Of a mask: ceil(vocabulary / 32).
        ends: End tokens of the model.
        stops: Tokens that end this output beside them. Those that are no text come where it may
            end; the others are text as well.

    Attributes:
        done: Whether the text is complete, and nothing but its end may come.
    """

    def __init__(
        self, compiled: Any, words: int, ends: Set[int], stops: Sequence[int] = ()
    ) -> None:
        import xgrammar

        info = compiled.tokenizer_info
        ends = ends | ({*stops} & {*info.special_token_ids} if stops else set())
        self._matcher = xgrammar.GrammarMatcher(
            compiled, override_stop_tokens=sorted(ends) or list(info.stop_token_ids)
        )
        self._filled = np.zeros((1, -(-info.vocab_size // 32)), dtype=np.int32)
        self._ends = np.zeros(words, dtype=np.int32)
        for token in ends:
            self._ends.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)
        self._words, self.done = words, False
        self._fill()

    def accept(self, token: int) -> bool:
        """Take the next token; False where it does not match, or no text goes on with it."""
        if not self._matcher.accept_token(token):
            return False
        if self._matcher.is_terminated():
            self.done = True
            return True
        self._fill()
        return not self.done or self._matcher.is_completed()

    def mask(self, *, ends: bool = True) -> np.ndarray:
        """Which tokens may come, int32 [ceil(vocabulary / 32)], bit i % 32 of word i // 32.

        Args:
            ends: Whether end tokens may, if there are others.
        """
        return self._allowed(self._filled, ends=ends)

    def masks_behind(self, drafts: Sequence[int], ends: Sequence[bool]) -> list[np.ndarray]:
        """Which tokens may come next, and after each of some drafts, as if these had come.

        Args:
            drafts: One token after the other. After the first that may not come, where nothing
                counts, masks are those before it.
            ends: As `ends` of `mask`, for each of them.

        Returns:
            As `mask`, one more than there are drafts.
        """
        masks, filled, taken = [self.mask(ends=ends[0])], self._filled.copy(), 0
        for token, may_end in zip(drafts, ends[1:], strict=True):
            going = taken == len(masks) - 1 and not self._matcher.is_terminated()
            if going and self._matcher.accept_token(token):
                taken += 1
                if not self._matcher.is_terminated():
                    self._matcher.fill_next_token_bitmask(filled)
            masks.append(self._allowed(filled, ends=may_end).copy())
        if taken:
            self._matcher.rollback(taken)
        return masks

    def _allowed(self, filled: np.ndarray, *, ends: bool) -> np.ndarray:
        allowed = filled[0, : self._words]
        others = allowed & ~self._ends
        return allowed if ends or not others.any() else others

    def _fill(self) -> None:
        self._matcher.fill_next_token_bitmask(self._filled)
        self.done = not (self._filled[0, : self._words] & ~self._ends).any()
