"""Text of a growing token sequence, held back where it may still change or be a stop text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

REPLACEMENT = "\ufffd"  # what an unfinished character decodes to


class Detokenizer:
    """Decodes tokens as they come; what a token costs does not grow with the text.

    A token may end within a character: its text is then held back until the character is complete.
    Text that could be the beginning of a stop text is held back as well.

    Args:
        tokenizer: A transformers tokenizer.
        stop: Texts that end the output.

    Attributes:
        pieces: The text that is certain, piece by piece; only ever appended to.
        stopped: Whether a stop text was found; the text before it is all there is.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._tokens: list[int] = []
        self._context = 0  # decoding starts here: tokens before it no longer influence the text
        self._read = 0  # tokens whose text is in `pieces` or `_held`
        self._held = ""
        self.pieces: list[str] = []
        self.stopped = False

    def add(self, token: int) -> None:
        """Take one token; `pieces` and `stopped` tell what came of it."""
        if self.stopped:
            return
        self._tokens.append(token)
        before = self._decode(self._context, self._read)
        after = self._decode(self._context, len(self._tokens))
        if after.endswith(REPLACEMENT):
            return
        self._context, self._read = self._read, len(self._tokens)
        self._release(after[len(before) :])

    def finish(self) -> None:
        """No more tokens come: release what was held back."""
        if self.stopped:
            return
        before = self._decode(self._context, self._read)
        self._release(self._decode(self._context, len(self._tokens))[len(before) :])
        if not self.stopped:
            self._show(len(self._held))

    def _decode(self, begin: int, end: int) -> str:
        return self._tokenizer.decode(self._tokens[begin:end], skip_special_tokens=True)

    def _release(self, text: str) -> None:
        """Show new text up to a stop text, or up to what could be the beginning of one."""
        self._held += text
        found = [i for i in map(self._held.find, self._stop) if i >= 0]
        if found:
            self._show(min(found))
            self.stopped = True
            return
        open_end = max((self._overlap(stop) for stop in self._stop), default=0)
        self._show(len(self._held) - open_end)

    def _show(self, count: int) -> None:
        """Make characters of what is held back certain."""
        if count:
            self.pieces.append(self._held[:count])
            self._held = self._held[count:]

    def _overlap(self, stop: str) -> int:
        """Length of the longest beginning of `stop` that the text ends with."""
        most = min(len(stop) - 1, len(self._held))
        return next((n for n in range(most, 0, -1) if self._held.endswith(stop[:n])), 0)
