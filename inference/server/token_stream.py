"""The tokens of one request as they come from the engine process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from formats.errors import PTQError, RequestError
from inference.requests.request import FinishReason
from inference.server.messages import Logprobs


@dataclass(frozen=True)
class TokenDelta:
    """What a request gained since its stream was read last.

    Attributes:
        token_ids: Its new tokens, an end token included.
        logprobs: For each of them, {token: log probability}; None where none are wanted.
        prompt_logprobs: Once, with the first tokens: for each token of the prompt, the same, None
            for the first. None at other times, and where none are wanted.
        finish_reason: `stop` (an end token, which is then the last of all tokens), `length`,
            `error` (the engine failed at it: 500), `abort` (the server ends: 503); None before.
        error: Why, where the reason is `error` or `abort`.
        drafts: How many drafts the steps had that gave the tokens.
        accepted: How many of the tokens were drafts.
    """

    token_ids: list[int]
    logprobs: list[Logprobs] | None = None
    prompt_logprobs: list[Logprobs | None] | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None
    drafts: int = 0
    accepted: int = 0


class TokenStream:
    """The tokens of one request: an async iterator, and a context manager that cancels at its end.

        async with client.submit(prompt, params) as stream:
            async for delta in stream:
                ...

    What came since the last read is one item, so that a slow reader holds nobody up; the request's
    `max_tokens` bounds it. The last item has a finish reason. Read it from one task at a time.

    Args:
        name: The request's.
        on_cancel: Told the name and a reason where the stream is cancelled before its end.

    Attributes:
        name: The request's.
    """

    def __init__(self, name: str, on_cancel: Callable[[str, FinishReason], None]) -> None:
        self.name = name
        self._on_cancel = on_cancel
        self._tokens: list[int] = []
        self._logprobs: list[Logprobs] | None = None
        self._prompt_logprobs: list[Logprobs | None] | None = None
        self._drafts = self._accepted = 0
        self._reason: FinishReason | None = None
        self._error: str | None = None
        self._refusal: PTQError | None = None
        self._over = False  # nothing more is told
        self._reader: asyncio.Future[None] | None = None

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> TokenDelta:
        """Wait for what comes next.

        Raises:
            RequestError: the engine does not take the request.
            StopAsyncIteration: the stream was cancelled, or its last item is read.
        """
        while not self._over:
            if self._refusal is not None:
                self._over = True
                raise self._refusal
            if self._tokens or self._reason is not None:
                return self._take()
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        raise StopAsyncIteration

    def cancel(self, reason: FinishReason = "abort") -> None:
        """End the request, if it has not ended; nothing more comes. May be called again.

        Args:
            reason: What is counted: `stop` where a stop text was found.
        """
        ended = self._over or self._reason is not None or self._refusal is not None
        self._over = True
        self._wake()
        if not ended:
            self._on_cancel(self.name, reason)

    async def __aenter__(self) -> TokenStream:
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
        self._tokens.append(token)
        if self._reader is not None:
            self._wake()

    def add_logprobs(self, logprobs: Logprobs) -> None:
        """Take the log probabilities of a token; before or after it, in the same message."""
        if self._logprobs is None:
            self._logprobs = []
        self._logprobs.append(logprobs)

    def add_prompt_logprobs(self, logprobs: list[Logprobs | None]) -> None:
        """Take the log probabilities of the prompt; before its first token is read."""
        self._prompt_logprobs = logprobs

    def add_drafts(self, drafts: int, accepted: int) -> None:
        """Take how many drafts a step had and accepted; in the message of its tokens."""
        self._drafts += drafts
        self._accepted += accepted

    def finish(self, reason: FinishReason, error: str | None = None) -> None:
        """Nothing more comes."""
        self._reason, self._error = reason, error
        self._wake()

    def refuse(self, message: str, param: str | None = None) -> None:
        """The engine does not take the request."""
        self._refusal = RequestError(message, param)
        self._wake()

    def _take(self) -> TokenDelta:
        """All there is."""
        delta = TokenDelta(
            self._tokens,
            self._logprobs,
            self._prompt_logprobs,
            self._reason,
            self._error,
            self._drafts,
            self._accepted,
        )
        self._over = self._reason is not None
        self._tokens, self._prompt_logprobs = [], None
        self._drafts = self._accepted = 0
        if self._logprobs is not None:
            self._logprobs = []
        return delta

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
