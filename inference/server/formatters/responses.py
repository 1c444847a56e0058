"""`/v1/responses`: OpenAI's newer way to ask, without what has to be stored for it.

A question is read as a chat, and answered as one; `previous_response_id` and the like are refused.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import Any
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response

from formats.errors import PTQError, RequestError
from inference.server.call import Call
from inference.server.formatters.chat import ChatBody, chat_call
from inference.server.formatters.formatter import Formatter, answer
from inference.server.http.responses import ApiError, api_error, dumps
from inference.server.logprobs import chat_logprobs
from inference.server.schema import chat as chats
from inference.server.schema import responses as asked
from inference.server.schema.generation import JsonSchemaFormat, NamedSchema
from inference.server.served_model import ServedModel
from inference.server.stream import Delta
from inference.server.tools.parser import CallDelta

Event = dict[str, Any]
FIELDS = {"messages": "input", "max_completion_tokens": "max_output_tokens"}
FIELDS |= {"response_format": "text.format"}


async def respond(request: Request, served: ServedModel, body: asked.ResponsesBody) -> Response:
    """Answer `POST /v1/responses`."""
    if body.top_logprobs and not body.logprobs:
        message = "top_logprobs: they need message.output_text.logprobs in include"
        raise ApiError(400, message, "top_logprobs")
    try:
        call = await chat_call(served, _chat(body))
    except (ApiError, RequestError) as error:
        raise _of_responses(error) from error
    return await answer(request, ResponseFormatter(call, body), stream=bool(body.stream))


def _of_responses(error: ApiError | RequestError) -> ApiError:
    """An error of a chat with the name that its field has here."""
    refusal = api_error(error)
    name = FIELDS.get(refusal.param or "")
    if name is not None:
        message = refusal.message.replace(f"{refusal.param}", name, 1)
        return ApiError(refusal.status, message, name, refusal.code, refusal.headers)
    return refusal


def _chat(body: asked.ResponsesBody) -> ChatBody:
    """The same question in the words of a chat."""
    choice = body.tool_choice
    functions = [chats.Function(**t.model_dump(exclude={"type"})) for t in body.tools or ()]
    if isinstance(choice, asked.NamedFunction):
        choice = chats.NamedTool(function=chats.FunctionName(name=choice.name))
    form = body.text and body.text.format
    if isinstance(form, asked.SchemaFormat):
        named = NamedSchema(name=form.name, schema=form.json_schema)
        form = JsonSchemaFormat(type="json_schema", json_schema=named)
    return ChatBody(
        model=body.model,
        messages=_messages(body),
        max_completion_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        logprobs=body.logprobs,
        top_logprobs=body.top_logprobs if body.logprobs else None,
        response_format=form,
        tools=[chats.Tool(function=function) for function in functions] or None,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls,
    )


def _messages(body: asked.ResponsesBody) -> list[chats.AnyMessage]:
    """A chat; calls that follow one another, and a text before them, are one message."""
    made: list[chats.AnyMessage] = []
    if body.instructions:
        made.append(chats.Message(role="system", content=body.instructions))
    if isinstance(body.input, str):
        return [*made, chats.Message(role="user", content=body.input)]
    for item in body.input:
        if isinstance(item, asked.OutputItem):
            text = chats.text_of(item.output)
            made.append(chats.ToolMessage(role="tool", content=text, tool_call_id=item.call_id))
        elif isinstance(item, asked.CallItem):
            message = made[-1] if made else None
            if isinstance(message, chats.AssistantMessage):
                made.pop()
            else:
                message = chats.AssistantMessage(role="assistant")
            called = chats.FunctionCall(name=item.name, arguments=item.arguments)
            calls = [*(message.tool_calls or ()), chats.ToolCall(id=item.call_id, function=called)]
            made.append(message.model_copy(update={"tool_calls": calls}))
        elif item.role == "assistant":
            text = chats.text_of(item.content)
            made.append(chats.AssistantMessage(role="assistant", content=text))
        else:
            made.append(chats.Message(role=item.role, content=chats.text_of(item.content)))
    return made


class ResponseItems:
    """An answer's items: messages and calls, one after another.

    Attributes:
        items: What there is, as OpenAI has it; the last may be incomplete.
    """

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._open = False  # whether the last item still grows
        self._texts: list[str] = []  # of the item that grows: its text, or its arguments
        self._known: list[dict[str, Any]] = []  # log probabilities of tokens whose text is held

    def add(self, delta: Delta, logprobs: Sequence[dict[str, Any]]) -> Iterator[Event]:
        """Take what the answer gained, and log probabilities of its tokens; the events."""
        self._known += logprobs
        for part in delta.parts:
            if isinstance(part, CallDelta):
                yield from self._add_call(part)
                continue
            if not (self._open and self.items[-1]["type"] == "message"):
                yield from self._close()
                yield from self._open_message()
            yield self._add_text(part)

    def finish(self, status: str) -> Iterator[Event]:
        """No more comes; an answer without anything has an empty text.

        Args:
            status: Of the last item, `completed` or `incomplete`.
        """
        if not self.items:
            yield from self._open_message()
        yield from self._close(status)

    def _event(self, kind: str, **fields: Any) -> Event:
        """An event that tells of the last item."""
        place = {"output_index": len(self.items) - 1, "item_id": self.items[-1]["id"]}
        return {"type": f"response.{kind}", **place, **fields}

    def _item_event(self, kind: str, item: dict[str, Any]) -> Event:
        place = {"output_index": len(self.items) - 1}
        return {"type": f"response.output_item.{kind}", **place, "item": item}

    def _open_item(self, prefix: str, kind: str, **fields: Any) -> Event:
        item = {"id": f"{prefix}_{uuid4().hex}", "type": kind, "status": "in_progress", **fields}
        self.items.append(item)
        self._open, self._texts = True, []
        return self._item_event("added", dict(item))

    def _open_message(self) -> Iterator[Event]:
        yield self._open_item("msg", "message", role="assistant", content=[])
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self.items[-1]["content"] = [part]
        added = {**part, "logprobs": []}
        yield self._event("content_part.added", content_index=0, part=added)

    def _add_text(self, text: str) -> Event:
        known, self._known = self._known, []
        self._texts.append(text)
        self.items[-1]["content"][0]["logprobs"] += known
        return self._event("output_text.delta", content_index=0, delta=text, logprobs=known)

    def _add_call(self, delta: CallDelta) -> Iterator[Event]:
        self._known = []  # of tokens that are no text
        if delta.id is not None:
            yield from self._close()
            called = {"call_id": delta.id, "name": delta.name, "arguments": ""}
            yield self._open_item("fc", "function_call", **called)
        if delta.arguments:
            self._texts.append(delta.arguments)
            yield self._event("function_call_arguments.delta", delta=delta.arguments)

    def _close(self, status: str = "completed") -> Iterator[Event]:
        """End the item that grows, if one does: its text as one, and that it is done."""
        if not self._open:
            return
        self._open = False
        item, text = self.items[-1], "".join(self._texts)
        item["status"] = status
        if item["type"] == "function_call":
            item["arguments"] = text
            called = {"name": item["name"], "arguments": text}
            yield self._event("function_call_arguments.done", **called)
        else:
            [part] = item["content"]
            part["text"] = text
            whole = {"content_index": 0, "text": text, "logprobs": part["logprobs"]}
            yield self._event("output_text.done", **whole)
            yield self._event("content_part.done", content_index=0, part=part)
        yield self._item_event("done", item)


class ResponseFormatter(Formatter):
    """Writes responses: events of server-sent events have names, and are numbered."""

    done = b""

    def __init__(self, call: Call, body: asked.ResponsesBody) -> None:
        super().__init__(call)
        self._head = _head(body, body.model or call.served.settings.model)
        self._items = ResponseItems()
        self._count = 0  # of events

    async def whole(self) -> dict[str, Any]:
        """The answer as one object, made of its events."""
        *_, last = [self._take(delta) async for _, delta in self.call.deltas()]
        return last[-1]["response"]

    def events(self, index: int, delta: Delta) -> bytes:
        """The events, numbered on."""
        begun: list[Event] = []
        if not self._count:
            response = self._response("in_progress")
            kinds = ("response.created", "response.in_progress")
            begun = [{"type": kind, "response": response} for kind in kinds]
        return self._write([*begun, *self._take(delta)])

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """It in events; what is wrong before the first is an error of its own."""
        try:
            async with aclosing(super().frames()) as frames:
                async for frame in frames:
                    yield frame
        except PTQError as error:
            if not self._count:
                raise
            content = {"code": "server_error", "message": api_error(error).message}
            response = self._response("failed", error=content)
            yield self._write([{"type": "response.failed", "response": response}])

    def _take(self, delta: Delta) -> list[Event]:
        """The events of what the answer gained."""
        top, logprobs = self.call.params[0].logprobs, []
        if top is not None:
            texts, known = self.call.served.texts, delta.logprobs or ()
            logprobs = chat_logprobs(texts, delta.token_ids, known, top)["content"]
        events = [*self._items.add(delta, logprobs)]
        if delta.finish_reason is None:
            return events
        status = "incomplete" if delta.finish_reason == "length" else "completed"
        events += self._items.finish(status)
        why = {"reason": "max_output_tokens"} if status == "incomplete" else None
        response = self._response(status, incomplete_details=why)
        return [*events, {"type": f"response.{status}", "response": response}]

    def _response(self, status: str, **more: Any) -> dict[str, Any]:
        """The response so far."""
        ended = status != "in_progress"
        usage = self.call.usage
        counts = {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
            "output_tokens": usage.completion,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt + usage.completion,
        }
        content = {"status": status, "output": list(self._items.items) if ended else []}
        content |= {"usage": counts if ended else None}
        return self._head | content | {"completed_at": int(time.time()) if ended else None} | more

    def _write(self, events: Sequence[Event]) -> bytes:
        """Server-sent events, numbered on."""
        made: list[str] = []
        for event in events:
            numbered = event | {"sequence_number": self._count}
            made.append(f"event: {event['type']}\ndata: {dumps(numbered)}\n\n")
            self._count += 1
        return "".join(made).encode()


def _head(body: asked.ResponsesBody, model: str) -> dict[str, Any]:
    """What is the same as long as a response grows: what was asked, and what stands for nothing."""
    given = body.model_dump(by_alias=True, exclude_none=True)
    text = given.get("text", {})
    return {
        "id": f"resp_{uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "model": model,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "background": False,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": body.safety_identifier,
        "prompt_cache_key": body.prompt_cache_key,
        "service_tier": "default",
        "store": False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": text.get("format", {"type": "text"}), "verbosity": "medium"},
        "tool_choice": given.get("tool_choice", "auto"),
        "tools": given.get("tools", []),
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "user": body.user,
    }
