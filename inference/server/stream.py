"""What one request gains, as it comes from the engine process: tokens, and their text."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from formats.errors import PTQError, RequestError
from inference.requests.detokenizer import Detokenizer
from inference.requests.request import FinishReason, Logprobs
from inference.server.tools.parser import MessageDelta


@dataclass(slots=True)
class Delta:
    """What a request gained since its stream was read last, or all of one answer.

    Attributes:
        text: New text that is certain: without a stop text, the beginning of one, or half of a
            character. Empty where the stream only gives tokens.
        parts: Of a `Call`: the same as texts and parts of tool calls, in their order. They may
            follow later than the text, since half a call may turn out to be text.
        token_ids: Its new tokens, up to the one that completes a stop text, or an end token,
            included. Their text may follow later.
        logprobs: For each of them, {token: log probability}; None where none are wanted.
        prompt_logprobs: Once, with the first tokens: for each token of the prompt, the same, None
            for the first. None at other times, and where none are wanted.
        finish_reason: `stop` (an end token, which is then the last of all tokens, or a stop text),
            `length`, `tool_calls` (of a `Call`: calls are all that is wanted), `error` (the engine
            failed at it: 500), `abort` (the server ends: 503); None before.
        error: Why, where the reason is `error` or `abort`.
        drafts: How many drafts the steps had that gave the tokens.
        accepted: How many of the tokens were drafts.
        cached: Tokens of the prompt that the prefix cache held: once, with the first tokens.
    """

    text: str = ""
    parts: list[MessageDelta] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] | None = None
    prompt_logprobs: Sequence[Logprobs | None] | None = None
    finish_reason: FinishReason | Literal["tool_calls"] | None = None
    error: str | None = None
    drafts: int = 0
    accepted: int = 0
    cached: int = 0

    @property
    def mean_logprob(self) -> float:
        """Mean log probability of the chosen tokens; the best of several answers is found by it."""
        chosen = [known[t] for t, known in zip(self.token_ids, self.logprobs or (), strict=True)]
        return sum(chosen) / max(1, len(chosen))

    def add(self, later: Delta) -> None:
        """Append what the request gained after this."""
        self.text += later.text
        self.parts += later.parts
        self.token_ids += later.token_ids
        if self.logprobs is None:
            self.logprobs = later.logprobs
        else:
            self.logprobs += later.logprobs or ()
        self.prompt_logprobs = later.prompt_logprobs or self.prompt_logprobs
        self.finish_reason = later.finish_reason or self.finish_reason
        self.error = later.error or self.error
        self.drafts += later.drafts
        self.accepted += later.accepted
        self.cached += later.cached


class AnswerText(Detokenizer):
    """The text of one request's tokens, the same as `Engine.generate` gives.

    Args:
        stop: Texts that end the output; they are not part of it.
        min_tokens: The request's: a stop text ends it no sooner, but no text follows it.
        ends: Tokens that end the output and are no text. Needed only with a constraint, whose text
            may be complete without any; otherwise the last token of `stop` is one.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        ends: Container[int] | None = None,
    ) -> None:
        super().__init__(tokenizer, stop)
        self._min_tokens, self._ends = min_tokens, ends
        self._made = self._given = 0  # tokens so far; pieces of the text that were returned

    def read(self, delta: Delta) -> bool:
        """Add the new text to `delta`; whether a stop text ended the answer before the engine."""
        stopped = self._take_tokens(delta)
        # A stop text may cut accepted drafts off; a step's last token is no draft.
        delta.accepted = min(delta.accepted, len(delta.token_ids))
        delta.text = "".join(self.pieces[self._given :])
        self._given = len(self.pieces)
        return stopped

    def _take_tokens(self, delta: Delta) -> bool:
        reason = delta.finish_reason
        ended = reason == "stop"  # the engine looks for no stop text
        last = len(delta.token_ids) - 1
        for index, token in enumerate(delta.token_ids):
            self._made += 1
            if ended and index == last and (self._ends is None or token in self._ends):
                break
            self.add(token)
            if self.stopped and self._made >= self._min_tokens:
                del delta.token_ids[index + 1 :]
                if delta.logprobs is not None:
                    del delta.logprobs[index + 1 :]
                delta.finish_reason, delta.error = "stop", None
                return True
        if reason is not None:
            self.finish()
            if self.stopped and reason == "length":
                delta.finish_reason = "stop"  # what was held back completed a stop text
        return False


class DeltaStream:
    """What one request gains, read item by item, or cancelled by who does not read it to its end.

    All that arrived since the last read is one item, so that a slow reader delays nothing; the
    request's `max_tokens` bounds it. The last item has a finish reason. One task reads it, which
    waits for `news`; one that reads several streams has given them the same.

    Args:
        name: The request's.
        on_cancel: Called with the name and a reason where the stream is cancelled before its end.

    Attributes:
        name: The request's.
        gained: What arrived since the last read; `tell` says that it grew.
        news: The stream is put in here when something arrived.
        text: Makes text of the tokens, if anything does. An item then has text, log probabilities
            or a finish reason: tokens whose text is held back are part of the next. The request is
            cancelled in the engine where a stop text ends it.
    """

    def __init__(self, name: str, on_cancel: Callable[[str, FinishReason], None]) -> None:
        self.name = name
        self.gained = Delta()
        self.news: asyncio.Queue[DeltaStream] = asyncio.Queue()
        self.over = False
        self._on_cancel = on_cancel
        self.text: AnswerText | None = None
        self._held: Delta | None = None  # was read, and has no text yet
        self._refusal: PTQError | None = None
        self._is_news = False  # it is in `news`

    def read(self) -> Delta | None:
        """The next item, or None where there is none yet, or none at all.

        Raises:
            RequestError: the engine does not take the request.
        """
        self._is_news = False
        if self.over:
            return None
        if self._refusal is not None:
            self.over = True
            raise self._refusal
        delta = self.gained
        if not delta.token_ids and delta.finish_reason is None:
            return None
        self.gained = Delta(logprobs=None if delta.logprobs is None else [])
        self.over = delta.finish_reason is not None
        if self.text is None:
            return delta
        if self.text.read(delta):
            self.cancel("stop")
        if self._held is not None:
            self._held.add(delta)
            delta, self._held = self._held, None
        if delta.text or delta.finish_reason or delta.logprobs or delta.prompt_logprobs:
            return delta
        self._held = delta
        return None

    def cancel(self, reason: FinishReason = "abort") -> None:
        """End the request, if it has not ended; no item follows. May be called again.

        Args:
            reason: The reason to count: `stop` where a stop text was found.
        """
        ended = self.over or self.gained.finish_reason is not None or self._refusal is not None
        self.over = True
        self.tell()
        if not ended:
            self._on_cancel(self.name, reason)

    def finish(self, reason: FinishReason, error: str | None = None) -> None:
        """End the request: the next item is the last."""
        self.gained.finish_reason, self.gained.error = reason, error
        self.tell()

    def refuse(self, error: RequestError) -> None:
        """End the request: the engine does not take it."""
        self._refusal = error
        self.tell()

    def tell(self) -> None:
        """Wake the reader."""
        if not self._is_news:
            self._is_news = True
            self.news.put_nowait(self)
