"""`/v1/chat/completions`: chats, written by the model's template."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from inference.server.generation.chat_call import ChatCall, Part
from inference.server.generation.choices import check_beams
from inference.server.generation.chunks import Chunks, check_stream, quote
from inference.server.generation.logprobs import chat_logprobs
from inference.server.generation.served_model import ServedModel
from inference.server.http.body import read_body
from inference.server.http.errors import ApiError
from inference.server.http.responses import EventStream, Json, dumps, unless_gone
from inference.server.schema.chat import ChatBody
from inference.server.tools.parser import (
    CallDelta,
    ContentDelta,
    MessageDelta,
    ToolCall,
    join_deltas,
)


async def chat(request: Request, served: ServedModel) -> Response:
    """Answer `POST /v1/chat/completions`."""
    body = await read_body(request, ChatBody, served.settings.limits)
    served.check_model(body.model)
    _check(body)
    call = await unless_gone(request, ChatCall.prepare(served, body))
    request.state.log["tokens"] = call.usage
    completion = ChatCompletion(served, call)
    if body.stream:
        return EventStream(completion.frames(), served.settings.limits.write_seconds)
    return Json(await unless_gone(request, completion.answer()))


def _check(body: ChatBody) -> None:
    """Refuse what does not go together."""
    check_beams(body)
    if body.max_tokens not in (None, body.max_completion_tokens or body.max_tokens):
        message = "max_tokens: it is the older name of max_completion_tokens; give one of them"
        raise ApiError(400, message, "max_tokens")
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs: they need logprobs to be true", "top_logprobs")
    check_stream(body)


class ChatCompletion:
    """The answers to a chat as OpenAI tells them.

    Args:
        served: The engine and the tokenizer.
        call: What is answered.
    """

    def __init__(self, served: ServedModel, call: ChatCall) -> None:
        self._texts, self._call, self._body = served.texts, call, call.body
        self._head = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": call.body.model or served.settings.model,
        }

    async def answer(self) -> dict[str, Any]:
        """All of it."""
        made = await self._call.answers()
        choices = [self._choice(index, answer) for index, answer in enumerate(made)]
        content = self._head | {"choices": choices, "usage": self._call.usage.content}
        ids = {"prompt_token_ids": self._call.prompt} if self._body.return_token_ids else {}
        return content | ids

    def _choice(self, index: int, answer: Part) -> dict[str, Any]:
        text, calls = join_deltas(answer.deltas)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message["tool_calls"] = [_call(call) for call in calls]
        content = {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(answer),
            "finish_reason": answer.finish_reason,
        }
        return content | ({"token_ids": answer.token_ids} if self._body.return_token_ids else {})

    def _logprobs(self, part: Part) -> dict[str, Any] | None:
        top = self._call.top
        if top is None:
            return None
        return chat_logprobs(self._texts, part.token_ids, part.logprobs, top)

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """It in parts: for every choice its role, its text and calls, its end."""
        head = self._head | {"object": "chat.completion.chunk"}
        chunks = Chunks(head, self._body, self._call.usage)
        plain = self._call.top is None and not self._body.return_token_ids
        begun: set[int] = set()
        async with aclosing(self._call.parts()) as parts:
            async for index, part in parts:
                made = b""
                if index not in begun:
                    begun.add(index)
                    made = self._first(chunks, index)
                pieces = _plain(index, part) if plain else self._full(index, part)
                made += b"".join(map(chunks.frame, pieces))
                if part.finish_reason is not None:
                    made += chunks.frame(_piece(index, {}, None, part.finish_reason))
                if made:
                    yield made
        if last := chunks.last():
            yield last

    def _first(self, chunks: Chunks, index: int) -> bytes:
        """The chunk with the role."""
        more = ""
        if self._body.return_token_ids and index == 0:
            more = f',"prompt_token_ids":{dumps(self._call.prompt)}'
        role = {"role": "assistant", "content": None}
        return chunks.frame(_piece(index, role, None, None), more)

    def _full(self, index: int, part: Part) -> list[str]:
        """The choices of its chunks; the first has what is told of its tokens."""
        gained = [_told(delta) for delta in part.deltas]
        if (
            not gained
            and not part.logprobs
            and not (self._body.return_token_ids and part.token_ids)
        ):
            return []
        first, *others = gained or [{"content": ""}]
        ids = part.token_ids if self._body.return_token_ids else None
        made = [_piece(index, first, self._logprobs(part), None, ids)]
        return made + [_piece(index, other, None, None) for other in others]


def _plain(index: int, part: Part) -> list[str]:
    """The choices of chunks of which nothing but text and calls is told."""
    return [
        f'{{"index":{index},"delta":{{"content":{quote(delta.text)}}},'
        '"logprobs":null,"finish_reason":null}'
        if isinstance(delta, ContentDelta)
        else _piece(index, _told(delta), None, None)
        for delta in part.deltas
    ]


def _told(delta: MessageDelta) -> dict[str, Any]:
    """What a message gains."""
    if isinstance(delta, ContentDelta):
        return {"content": delta.text}
    return {"tool_calls": [_call_piece(delta)]}


def _call_piece(delta: CallDelta) -> dict[str, Any]:
    """A part of a call; the first has its id and its name."""
    if delta.id is None:
        return {"index": delta.index, "function": {"arguments": delta.arguments}}
    function = {"name": delta.name, "arguments": delta.arguments}
    return {"index": delta.index, "id": delta.id, "type": "function", "function": function}


def _call(call: ToolCall) -> dict[str, Any]:
    """A whole call."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _piece(
    index: int,
    delta: dict[str, Any],
    logprobs: dict[str, Any] | None,
    reason: str | None,
    token_ids: Sequence[int] | None = None,
) -> str:
    """The choice of a chunk."""
    content = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
    return dumps(content if token_ids is None else content | {"token_ids": list(token_ids)})
