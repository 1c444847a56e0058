"""What formatters share: answering a call at once or in events, and the chunks of two of them."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response

from inference.server.call import Call
from inference.server.http.responses import ApiError, EventStream, Json, dumps
from inference.server.schema.generation import GenerationBody
from inference.server.stream import Delta

OF_SAMPLING = (
    "temperature top_p top_k min_p seed presence_penalty frequency_penalty repetition_penalty "
    "logit_bias min_tokens stop response_format stream best_of echo"
).split()
OF_BEAMS = ("length_penalty", "early_stopping")


class Formatter(ABC):
    """Writes the answers of a call, whole or in events.

    Attributes:
        done: What ends a stream.
        quiet: What is sent after a long time without events; a comment, which clients pass over.
    """

    done, quiet = b"data: [DONE]\n\n", b": waiting\n\n"

    def __init__(self, call: Call) -> None:
        self.call = call

    @abstractmethod
    async def whole(self) -> dict[str, Any]:
        """All answers as one object."""

    @abstractmethod
    def events(self, index: int, delta: Delta) -> bytes:
        """What an answer gained, as events; none where nothing of it is shown."""

    def last(self) -> bytes:
        """The events after those of all answers."""
        return b""

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """The events of all answers; raises as `Call.deltas`."""
        async with aclosing(self.call.deltas()) as deltas:
            async for index, delta in deltas:
                if events := self.events(index, delta):
                    yield events
        if last := self.last():
            yield last


async def answer(request: Request, formatter: Formatter, *, stream: bool) -> Response:
    """The answer to a request, at once or as a stream."""
    request.state.log["tokens"] = formatter.call.usage
    if not stream:
        return Json(await formatter.whole())
    seconds = formatter.call.served.settings.limits.write_seconds
    return EventStream(formatter.frames(), seconds, formatter.done, formatter.quiet)


class ChunkFormatter(Formatter):
    """Writes chunks, each an object with choices; what is the same in all of them is made once.

    Args:
        body: What was asked; its `stream_options` choose what chunks say of usage.
        name: What ids begin with.
        kinds: The type of a whole answer, and that of a chunk.
    """

    def __init__(self, call: Call, body: GenerationBody, name: str, kinds: tuple[str, str]) -> None:
        super().__init__(call)
        self._head = {
            "id": f"{name}-{uuid4().hex}",
            "object": kinds[0],
            "created": int(time.time()),
            "model": body.model or call.served.settings.model,
        }
        options = body.stream_options
        self._usage = bool(options and options.include_usage)
        self._always = self._usage and bool(options and options.continuous_usage_stats)
        self._begin = f'data: {dumps(self._head | {"object": kinds[1]})[:-1]},"choices":['
        self._end = '],"usage":null}\n\n' if self._usage else "]}\n\n"

    @abstractmethod
    def choice(self, index: int, delta: Delta) -> dict[str, Any]:
        """All of an answer."""

    async def whole(self) -> dict[str, Any]:
        """All answers as one object."""
        answers = await self.call.answers()
        choices = [self.choice(index, one) for index, one in enumerate(answers)]
        return self._head | {"choices": choices, "usage": self.call.usage.content}

    def chunk(self, choice: str, more: str = "") -> bytes:
        """A chunk with one choice, which is JSON, and further fields, such as `,"key":1`."""
        end = self._end
        if self._always:
            end = f'],"usage":{dumps(self.call.usage.content)}}}\n\n'
        if more:
            end = f"]{more}{end[1:]}"
        return f"{self._begin}{choice}{end}".encode()

    def last(self) -> bytes:
        """The chunk without choices that tells the usage, if it is wanted."""
        if not self._usage:
            return b""
        return f'{self._begin}],"usage":{dumps(self.call.usage.content)}}}\n\n'.encode()


def check_stream(body: GenerationBody) -> None:
    """Refuse options of a stream where none is asked for.

    Raises:
        ApiError: 400.
    """
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options: they need stream", "stream_options")


def check_beams(body: GenerationBody) -> None:
    """Refuse what does not go with a beam search, or goes with nothing else; as `refuse_beside`."""
    search = body.beam_width is not None
    names = OF_SAMPLING if search else OF_BEAMS
    given = [name for name in names if getattr(body, name, None) not in (None, False)]
    refuse_beside(given, None if search else "beam_width")


def refuse_beside(given: Sequence[str], needed: str | None) -> None:
    """Refuse fields that do not go with a beam search, or go with nothing else.

    Args:
        given: Those that would have no effect.
        needed: What makes a beam search; None where there is one.

    Raises:
        ApiError: 400: there is such a field.
    """
    for name in given:
        reason = f"needs {needed}" if needed else "has no place in a beam search"
        raise ApiError(400, f"{name}: it {reason}; leave it out", name, "invalid_value")
