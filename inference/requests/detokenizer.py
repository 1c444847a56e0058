"""Text of a growing token sequence, held back where it may still change or be a stop text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, overload

REPLACEMENT = "\ufffd"  # what an unfinished character decodes to


class Detokenizer:
    """Decodes tokens as they come; what a token costs does not grow with the text.

    A token may end within a character: its text is then held back until the character is complete.
    Text that could be the beginning of a stop text is held back as well.

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

    @cached_property
    def _backend(self) -> Any:
        """Where tokens stand for bytes, what decodes them; then texts depend on no context."""
        return self._tokenizer.backend_tokenizer if decodes_bytes(self._tokenizer) else None

    @property
    def taken(self) -> int:
        """How many tokens it was given."""
        return len(self._tokens)

    def add(self, token: int) -> None:
        """Take one token; `pieces` and `stopped` tell the outcome."""
        if not self.stopped:
            self._tokens.append(token)
            self._read_up_to(len(self._tokens))

    def extend(self, tokens: Sequence[int]) -> None:
        """Take tokens: the same text as by `add` for each, if maybe in fewer pieces.

        Where tokens stand for bytes and no stop text is looked for, all are decoded at once, up to
        the last that ends a character; one takes at most four bytes.
        """
        if self._stop or len(tokens) < 2 or self._backend is None:
            for token in tokens:
                self.add(token)
            return
        self._tokens.extend(tokens)
        end = len(self._tokens)
        if not any(self._read_up_to(end - i) for i in range(min(len(tokens), 4))):
            for each in range(end - len(tokens) + 1, end):  # bytes that are no text
                self._read_up_to(each)

    def finish(self) -> None:
        """No more tokens come: release what was held back."""
        if self.stopped:
            return
        before = self._decode(self._context, self._read)
        self._release(self._decode(self._context, len(self._tokens))[len(before) :])
        if not self.stopped:
            self._show(len(self._held))

    def _read_up_to(self, end: int) -> bool:
        """Release the text of tokens up to an index; False if they end within a character."""
        before = self._decode(self._context, self._read)
        after = self._decode(self._context, end)
        if after.endswith(REPLACEMENT):
            return False
        self._context, self._read = end if self._backend is not None else self._read, end
        self._release(after[len(before) :])
        return True

    def _decode(self, begin: int, end: int) -> str:
        if begin == end:
            return ""
        decoder = self._tokenizer if self._backend is None else self._backend
        return decoder.decode(self._tokens[begin:end], skip_special_tokens=True)

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


class LateText(Sequence[str]):
    """The pieces of a whole output's text, decoded when they are first looked at.

    Args:
        detokenizer: Has taken the first of the tokens, or none.
        tokens: Those of the output that have a text.
    """

    def __init__(self, detokenizer: Detokenizer, tokens: Sequence[int]) -> None:
        self._detokenizer, self._tokens = detokenizer, tokens

    @cached_property
    def _pieces(self) -> list[str]:
        self._detokenizer.extend(self._tokens[self._detokenizer.taken :])
        self._detokenizer.finish()
        return self._detokenizer.pieces

    def __len__(self) -> int:
        return len(self._pieces)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        return self._pieces[index]

    def __repr__(self) -> str:
        return repr(self._pieces)


def decodes_bytes(tokenizer: Any) -> bool:
    """Whether the text of tokens is that of their bytes, one after another, whatever stands beside.

    So it is where `tokenizers` decodes byte by byte and transformers leaves the text as it is.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return False
    from tokenizers.decoders import ByteLevel
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast as Fast

    kind = type(tokenizer)
    plain = kind.decode is Fast.decode and kind._decode is Fast._decode
    cleans = tokenizer.clean_up_tokenization_spaces and (
        not isinstance(backend.model, BPE)
        or tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output
    )
    return plain and not cleans and isinstance(backend.decoder, ByteLevel)
