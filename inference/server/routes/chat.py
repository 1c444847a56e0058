"""`/v1/chat/completions`: chats, written by the model's template."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from inference.server.generation.beams import beam_answers, check_beams
from inference.server.generation.choices import Answer, answers, deltas, submit
from inference.server.generation.chunks import Chunks, Usage, quote
from inference.server.generation.logprobs import chat_logprobs
from inference.server.generation.sampling import sampling_params
from inference.server.generation.served_model import ServedModel
from inference.server.http.body import read_body
from inference.server.http.errors import ApiError
from inference.server.http.responses import EventStream, Json, dumps, unless_gone
from inference.server.schema.chat import ChatBody, template_message
from inference.server.text_stream import TextDelta, TextStream


async def chat(request: Request, served: ServedModel) -> Response:
    """Answer `POST /v1/chat/completions`."""
    body = await read_body(request, ChatBody, served.settings.limits)
    served.check_model(body.model)
    _check(body)
    call = await unless_gone(request, Chat.prepare(served, body))
    request.state.log["tokens"] = call.usage
    if body.stream:
        return EventStream(call.frames(), served.settings.limits.write_seconds)
    return Json(await unless_gone(request, call.answer()))


def _check(body: ChatBody) -> None:
    """Refuse what does not go together."""
    check_beams(body)
    if body.max_tokens not in (None, body.max_completion_tokens or body.max_tokens):
        told = "max_tokens: it is the older name of max_completion_tokens; give one of them"
        raise ApiError(400, told, "max_tokens")
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs: they need logprobs to be true", "top_logprobs")
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options: they need stream", "stream_options")


class Chat:
    """One call, with its chat as token ids.

    Args:
        served: The engine and the tokenizer.
        body: What was asked.
        prompt: Token ids of the chat.

    Raises:
        ApiError: the chat is too long.
        RequestError: a parameter is not allowed.
    """

    def __init__(self, served: ServedModel, body: ChatBody, prompt: list[int]) -> None:
        self._served, self._body, self._prompt = served, body, prompt
        room = served.check_length(len(prompt), "messages")
        most = body.max_completion_tokens or body.max_tokens or room
        self._top = (body.top_logprobs or 0) if body.logprobs else None
        self._params = sampling_params(body, min(most, room), logprobs=self._top)
        self.usage = Usage(len(prompt))
        self._head = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": body.model or served.settings.model,
        }

    @classmethod
    async def prepare(cls, served: ServedModel, body: ChatBody) -> Chat:
        """Write the chat by the template and tokenize it.

        Raises:
            ApiError, RequestError: there is no template, it refuses the chat, or it is too long.
        """
        go_on = body.continue_final_message

        def render() -> list[int]:
            return served.render(
                [template_message(message) for message in body.messages],
                body.chat_template_kwargs,
                answer=body.add_generation_prompt,
                go_on=go_on,
            )

        return cls(served, body, await served.in_thread(render))

    def _submit(self) -> list[TextStream]:
        count = self._body.n or 1
        return submit(self._served, [self._prompt], [self._params], self._body.stops, count)

    async def answer(self) -> dict[str, Any]:
        """All of it."""
        if self._body.beam_width is not None:
            most = [self._params.max_tokens]
            made = await beam_answers(self._served, [self._prompt], self._body, most, self._top)
        else:
            made = await answers(self._submit())
        self.usage.completion = sum(len(answer.token_ids) for answer in made)
        choices = [self._choice(index, answer) for index, answer in enumerate(made)]
        told = self._head | {"choices": choices, "usage": self.usage.content}
        return told | ({"prompt_token_ids": self._prompt} if self._body.return_token_ids else {})

    def _choice(self, index: int, answer: Answer) -> dict[str, Any]:
        message = {"role": "assistant", "content": answer.text, "refusal": None}
        told = {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(answer),
            "finish_reason": answer.finish_reason,
        }
        return told | ({"token_ids": answer.token_ids} if self._body.return_token_ids else {})

    def _logprobs(self, delta: TextDelta | Answer) -> dict[str, Any] | None:
        if self._top is None:
            return None
        known = delta.logprobs or ()
        return chat_logprobs(self._served.texts, delta.token_ids, known, self._top)

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """It in parts: for every choice its role, its text, its end."""
        head = self._head | {"object": "chat.completion.chunk"}
        chunks, usage = Chunks(head, self._body, self.usage), self.usage
        plain = self._top is None and not self._body.return_token_ids
        begun: set[int] = set()
        async with aclosing(deltas(self._submit())) as parts:
            async for index, delta in parts:
                usage.completion += len(delta.token_ids)
                made = b""
                if index not in begun:
                    begun.add(index)
                    made = self._first(chunks, index)
                if delta.text or delta.logprobs:
                    made += chunks.frame(self._content(index, delta, plain))
                if delta.finish_reason is not None:
                    made += chunks.frame(_part(index, {}, None, delta.finish_reason))
                yield made
        if last := chunks.last():
            yield last

    def _first(self, chunks: Chunks, index: int) -> bytes:
        """The chunk with the role."""
        more = ""
        if self._body.return_token_ids and index == 0:
            more = f',"prompt_token_ids":{dumps(self._prompt)}'
        return chunks.frame(_part(index, {"role": "assistant", "content": None}, None, None), more)

    def _content(self, index: int, delta: TextDelta, plain: bool) -> str:
        """The choice of a chunk with text."""
        if plain:
            text = quote(delta.text)
            return (
                f'{{"index":{index},"delta":{{"content":{text}}},'
                '"logprobs":null,"finish_reason":null}'
            )
        ids = delta.token_ids if self._body.return_token_ids else None
        return _part(index, {"content": delta.text}, self._logprobs(delta), None, ids)


def _part(
    index: int,
    delta: dict[str, Any],
    logprobs: dict[str, Any] | None,
    reason: str | None,
    token_ids: Sequence[int] | None = None,
) -> str:
    """The choice of a chunk."""
    told = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
    return dumps(told if token_ids is None else told | {"token_ids": list(token_ids)})
