"""What one request gains, as it comes from the engine process: tokens, and their text."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from formats.errors import PTQError, RequestError
from inference.requests.detokenizer import Detokenizer
from inference.requests.request import FinishReason
from inference.server.messages import Logprobs


@dataclass(slots=True)
class Delta:
    """What a request gained since its stream was read last, or all of one answer.

    Attributes:
        text: New text that is certain: without a stop text, the beginning of one, or half of a
            character. Empty where the stream only gives tokens.
        token_ids: Its new tokens, up to the one that completes a stop text, or an end token,
            included. Their text may follow later.
        logprobs: For each of them, {token: log probability}; None where none are wanted.
        prompt_logprobs: Once, with the first tokens: for each token of the prompt, the same, None
            for the first. None at other times, and where none are wanted.
        finish_reason: `stop` (an end token, which is then the last of all tokens, or a stop text),
            `length`, `error` (the engine failed at it: 500), `abort` (the server ends: 503); None
            before.
        error: Why, where the reason is `error` or `abort`.
        drafts: How many drafts the steps had that gave the tokens.
        accepted: How many of the tokens were drafts.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] | None = None
    prompt_logprobs: list[Logprobs | None] | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None
    drafts: int = 0
    accepted: int = 0

    @property
    def mean_logprob(self) -> float:
        """Mean log probability of the chosen tokens; the best of several answers is found by it."""
        chosen = [known[t] for t, known in zip(self.token_ids, self.logprobs or (), strict=True)]
        return sum(chosen) / max(1, len(chosen))

    def add(self, later: Delta) -> None:
        """Append what the request gained after this."""
        self.text += later.text
        self.token_ids += later.token_ids
        if later.logprobs is not None:
            self.add_logprobs(later.logprobs)
        self.prompt_logprobs = later.prompt_logprobs or self.prompt_logprobs
        self.finish_reason = later.finish_reason or self.finish_reason
        self.error = later.error or self.error
        self.drafts += later.drafts
        self.accepted += later.accepted

    def add_logprobs(self, logprobs: Sequence[Logprobs]) -> None:
        """Append the log probabilities of tokens."""
        if self.logprobs is None:
            self.logprobs = []
        self.logprobs += logprobs

    def cut(self, count: int) -> None:
        """Keep only the first `count` tokens: a stop text ends the answer there."""
        del self.token_ids[count:]
        if self.logprobs is not None:
            del self.logprobs[count:]


class _Text:
    """The text of one request's tokens; arguments as of `DeltaStream.detokenize`."""

    def __init__(
        self, tokenizer: Any, stop: Sequence[str], min_tokens: int, ends: Container[int] | None
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, stop)
        self._min_tokens, self._ends = min_tokens, ends
        self._made = 0  # tokens so far
        self._given = 0  # pieces of the text that were returned

    def read(self, delta: Delta) -> bool:
        """Add the new text to `delta`; whether a stop text ended the answer before the engine."""
        stopped = self._take_tokens(delta)
        # A stop text may cut accepted drafts off; a step's last token is no draft.
        delta.accepted = min(delta.accepted, len(delta.token_ids))
        pieces = self._detokenizer.pieces
        delta.text = "".join(pieces[self._given :])
        self._given = len(pieces)
        return stopped

    def _take_tokens(self, delta: Delta) -> bool:
        detokenizer, reason = self._detokenizer, delta.finish_reason
        ended = reason == "stop"  # the engine looks for no stop text
        for index, token in enumerate(delta.token_ids):
            self._made += 1
            if ended and index == len(delta.token_ids) - 1 and self._is_end(token):
                break
            detokenizer.add(token)
            if detokenizer.stopped and self._made >= self._min_tokens:
                delta.cut(index + 1)
                delta.finish_reason, delta.error = "stop", None
                return True
        if reason is not None:
            detokenizer.finish()
            if detokenizer.stopped and reason == "length":
                delta.finish_reason = "stop"  # what was held back completed a stop text
        return False

    def _is_end(self, token: int) -> bool:
        return self._ends is None or token in self._ends


class DeltaStream:
    """What one request gains: an async iterator, and a context manager that cancels at its end.

        async with client.submit(prompt, params).detokenize(tokenizer) as stream:
            async for delta in stream:
                ...

    All that arrived since the last read is one item, so that a slow reader delays nothing; the
    request's `max_tokens` bounds it. The last item has a finish reason. Read it from one task at a
    time.

    Args:
        name: The request's.
        on_cancel: Called with the name and a reason where the stream is cancelled before its end.

    Attributes:
        name: The request's.
    """

    def __init__(self, name: str, on_cancel: Callable[[str, FinishReason], None]) -> None:
        self.name = name
        self._on_cancel = on_cancel
        self._text: _Text | None = None
        self._gained = Delta()
        self._refusal: PTQError | None = None
        self._over = False  # no item follows
        self._reader: asyncio.Future[None] | None = None

    def detokenize(
        self,
        tokenizer: Any,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        ends: Container[int] | None = None,
    ) -> DeltaStream:
        """Give the text of the tokens, too, the same as `Engine.generate`; before the first read.

        An item then has text, log probabilities or a finish reason: tokens whose text is held back
        are part of the next. The request is cancelled in the engine where a stop text ends it.

        Args:
            tokenizer: A transformers tokenizer.
            stop: Texts that end the output; they are not part of it.
            min_tokens: The request's: a stop text ends it no sooner, but no text follows it.
            ends: Tokens that end the output and are no text. Needed only with a constraint, whose
                text may be complete without any; otherwise the last token of `stop` is one.
        """
        self._text = _Text(tokenizer, stop, min_tokens, ends)
        return self

    def __aiter__(self) -> DeltaStream:
        return self

    async def __anext__(self) -> Delta:
        """Wait for the next item.

        Raises:
            RequestError: the engine does not take the request.
            StopAsyncIteration: the stream was cancelled, or its last item is read.
        """
        held: Delta | None = None
        while not self._over:
            if self._refusal is not None:
                self._over = True
                raise self._refusal
            if self._gained.token_ids or self._gained.finish_reason is not None:
                delta = self._take()
                if self._text is not None and self._text.read(delta):
                    self.cancel("stop")
                if held is not None:
                    held.add(delta)
                    delta = held
                if self._text is None or delta.finish_reason is not None:
                    return delta
                if delta.text or delta.logprobs or delta.prompt_logprobs:
                    return delta
                held = delta
                continue
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        raise StopAsyncIteration

    def cancel(self, reason: FinishReason = "abort") -> None:
        """End the request, if it has not ended; no item follows. May be called again.

        Args:
            reason: The reason to count: `stop` where a stop text was found.
        """
        ended = self._over or self._gained.finish_reason is not None or self._refusal is not None
        self._over = True
        self._wake()
        if not ended:
            self._on_cancel(self.name, reason)

    async def __aenter__(self) -> DeltaStream:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cancel()

    def add_token(self, token: int) -> None:
        """Take a token."""
        self._gained.token_ids.append(token)
        if self._reader is not None:
            self._wake()

    def add_logprobs(self, logprobs: Logprobs) -> None:
        """Take the log probabilities of a token; before or after it, in the same message."""
        self._gained.add_logprobs([logprobs])

    def add_prompt_logprobs(self, logprobs: list[Logprobs | None]) -> None:
        """Take the log probabilities of the prompt; before its first token is read."""
        self._gained.prompt_logprobs = logprobs

    def add_drafts(self, drafts: int, accepted: int) -> None:
        """Take how many drafts a step had and accepted; in the message of its tokens."""
        self._gained.drafts += drafts
        self._gained.accepted += accepted

    def finish(self, reason: FinishReason, error: str | None = None) -> None:
        """End the request: the next item is the last."""
        self._gained.finish_reason, self._gained.error = reason, error
        self._wake()

    def refuse(self, message: str, param: str | None = None) -> None:
        """End the request: the engine does not take it."""
        self._refusal = RequestError(message, param)
        self._wake()

    def _take(self) -> Delta:
        """All that arrived."""
        delta = self._gained
        self._over = delta.finish_reason is not None
        self._gained = Delta(logprobs=None if delta.logprobs is None else [])
        return delta

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
