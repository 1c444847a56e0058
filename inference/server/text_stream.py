"""The text of one request as it comes: the same as that of `Engine.generate`."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from inference.requests.detokenizer import Detokenizer
from inference.requests.request import FinishReason
from inference.server.messages import Logprobs
from inference.server.token_stream import TokenDelta, TokenStream


@dataclass(frozen=True)
class TextDelta:
    """What a request gained since its stream was read last; fields as of `TokenDelta`.

    Attributes:
        text: New text that is certain: without a stop text, the beginning of one, or half of a
            character.
        token_ids: The new tokens, whose text may come later: up to the one that completes a stop
            text, or an end token, included.
        logprobs: For each of them, {token: log probability}; None where none are wanted.
        prompt_logprobs: Once, with the first tokens; None at other times.
        finish_reason: None before the end.
        error: Why, where the reason is `error` (500) or `abort` (503).
        drafts: How many drafts the steps had that gave the tokens.
        accepted: How many of the tokens were drafts.
    """

    text: str
    token_ids: list[int]
    logprobs: list[Logprobs] | None = None
    prompt_logprobs: list[Logprobs | None] | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None
    drafts: int = 0
    accepted: int = 0


class TextStream:
    """The text of a token stream: an async iterator, and a context manager that cancels at its end.

    An item has text, log probabilities or a finish reason: tokens whose text is held back come with
    the next. The request is cancelled in the engine where a stop text ends it.

    Args:
        stream: The tokens.
        tokenizer: A transformers tokenizer.
        stop: Texts that end the output; they are not part of it.
        min_tokens: The request's: a stop text ends it no sooner, but no text comes after it.
        ends: Tokens that end it and are no text. Only one with a constraint, whose text may be
            complete without any, has to be told; of another the last token of `stop` is one.
    """

    def __init__(
        self,
        stream: TokenStream,
        tokenizer: Any,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        ends: Container[int] | None = None,
    ) -> None:
        self._stream, self._min_tokens, self._ends = stream, min_tokens, ends
        self._detokenizer = Detokenizer(tokenizer, stop)
        self._made = 0  # tokens so far
        self._told = 0  # pieces of the text that were given
        self._over = False

    def __aiter__(self) -> TextStream:
        return self

    async def __anext__(self) -> TextDelta:
        """Wait for what comes next; raises as `TokenStream.__anext__`."""
        tokens, drafts, accepted = list[int](), 0, 0
        while not self._over:
            delta = await self._stream.__anext__()
            count, reason = self._read(delta)
            tokens += delta.token_ids[:count]
            drafts += delta.drafts
            accepted += min(delta.accepted, count)  # a step's last token was no draft
            text = self._new_text()
            told = text or delta.logprobs or delta.prompt_logprobs
            if told or reason is not None:
                self._over = reason is not None
                logprobs = None if delta.logprobs is None else delta.logprobs[:count]
                error = delta.error if reason in ("error", "abort") else None
                known = delta.prompt_logprobs
                return TextDelta(text, tokens, logprobs, known, reason, error, drafts, accepted)
        raise StopAsyncIteration

    def cancel(self) -> None:
        """End the request, if it has not ended; nothing more comes. May be called again."""
        self._over = True
        self._stream.cancel()

    async def __aenter__(self) -> TextStream:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cancel()

    def _read(self, delta: TokenDelta) -> tuple[int, FinishReason | None]:
        """Take the tokens; how many of them belong to the output, and why it ends, if it does."""
        detokenizer, reason = self._detokenizer, delta.finish_reason
        ended = reason == "stop"  # the engine looks for no stop text
        for index, token in enumerate(delta.token_ids):
            self._made += 1
            if ended and index == len(delta.token_ids) - 1 and self._is_end(token):
                break
            detokenizer.add(token)
            if detokenizer.stopped and self._made >= self._min_tokens:
                self._stream.cancel("stop")
                return index + 1, "stop"
        if reason is not None:
            detokenizer.finish()
            if detokenizer.stopped and reason == "length":
                reason = "stop"  # what was held back completed a stop text
        return len(delta.token_ids), reason

    def _is_end(self, token: int) -> bool:
        return self._ends is None or token in self._ends

    def _new_text(self) -> str:
        pieces, told = self._detokenizer.pieces, self._told
        self._told = len(pieces)
        return "".join(pieces[told:])
