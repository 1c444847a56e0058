"""`/v1/responses`: OpenAI's newer way to ask, without what has to be stored for it.

A question is read as a chat, and answered as one; `previous_response_id` and the like are refused.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response

from formats.errors import PTQError, RequestError
from inference.server.generation.chat_call import ChatCall, Part
from inference.server.generation.logprobs import chat_logprobs
from inference.server.generation.served_model import ServedModel
from inference.server.http.body import read_body
from inference.server.http.errors import ApiError, api_error
from inference.server.http.responses import EventStream, Json, dumps, unless_gone
from inference.server.schema.responses import ResponsesBody
from inference.server.tools.parser import CallDelta, ContentDelta

Event = dict[str, Any]
TokenLogprobs = Callable[[Part], list[dict[str, Any]]]
FIELDS = {"messages": "input", "max_completion_tokens": "max_output_tokens"}
FIELDS |= {"response_format": "text.format"}


async def respond(request: Request, served: ServedModel) -> Response:
    """Answer `POST /v1/responses`."""
    body = await read_body(request, ResponsesBody, served.settings.limits)
    served.check_model(body.model)
    if body.top_logprobs and not body.logprobs:
        message = "top_logprobs: they need message.output_text.logprobs in include"
        raise ApiError(400, message, "top_logprobs")
    try:
        call = await unless_gone(request, ChatCall.prepare(served, body.chat()))
    except (ApiError, RequestError) as error:
        raise _of_responses(error) from error
    request.state.log["tokens"] = call.usage
    response = ModelResponse(served, body, call)
    if body.stream:
        return EventStream(response.frames(), served.settings.limits.write_seconds, done=b"")
    return Json(await unless_gone(request, response.answer()))


def _of_responses(error: ApiError | RequestError) -> ApiError:
    """An error of a chat with the name that its field has here."""
    refusal = error if isinstance(error, ApiError) else api_error(error)
    name = FIELDS.get(refusal.param or "")
    if name is not None:
        message = refusal.message.replace(f"{refusal.param}", name, 1)
        return ApiError(refusal.status, message, name, refusal.code, refusal.headers)
    return refusal


class ResponseItems:
    """An answer's items: messages and calls, one after another.

    Args:
        logprobs: The log probabilities of a part's tokens.

    Attributes:
        items: What there is, as OpenAI tells it; the last may be incomplete.
    """

    def __init__(self, logprobs: TokenLogprobs) -> None:
        self._logprobs = logprobs
        self.items: list[dict[str, Any]] = []
        self._open = False  # whether the last item still grows
        self._texts: list[str] = []  # of the item that grows: its text, or its arguments
        self._known: list[dict[str, Any]] = []  # log probabilities of tokens whose text is held

    def add(self, part: Part) -> list[Event]:
        """Take what the answer gained; the events that say so."""
        events: list[Event] = []
        self._known += self._logprobs(part)
        for delta in part.deltas:
            if isinstance(delta, ContentDelta):
                if not (self._open and self.items[-1]["type"] == "message"):
                    events += [*self._close(), *self._open_message()]
                events.append(self._add_text(delta.text))
            else:
                events += self._add_call(delta)
        return events

    def finish(self, status: str) -> list[Event]:
        """No more comes; an answer without anything has an empty text.

        Args:
            status: Of the last item, `completed` or `incomplete`.
        """
        events = [] if self.items else self._open_message()
        return events + self._close(status)

    @property
    def _place(self) -> dict[str, Any]:
        """Which item an event tells of."""
        return {"output_index": len(self.items) - 1, "item_id": self.items[-1]["id"]}

    def _open_item(self, item: dict[str, Any]) -> Event:
        self.items.append(item)
        self._open, self._texts = True, []
        index = len(self.items) - 1
        return {"type": "response.output_item.added", "output_index": index, "item": dict(item)}

    def _open_message(self) -> list[Event]:
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        item = {"id": f"msg_{uuid4().hex}", "type": "message", "status": "in_progress"}
        added = self._open_item(item | {"role": "assistant", "content": []})
        self.items[-1]["content"] = [part]
        place = {**self._place, "content_index": 0, "part": {**part, "logprobs": []}}
        return [added, {"type": "response.content_part.added", **place}]

    def _add_text(self, text: str) -> Event:
        known, self._known = self._known, []
        self._texts.append(text)
        self.items[-1]["content"][0]["logprobs"] += known
        content = {"content_index": 0, "delta": text, "logprobs": known}
        return {"type": "response.output_text.delta", **self._place, **content}

    def _add_call(self, delta: CallDelta) -> list[Event]:
        events: list[Event] = []
        self._known = []  # of tokens that are no text
        if delta.id is not None:
            events += self._close()
            item = {"id": f"fc_{uuid4().hex}", "type": "function_call", "status": "in_progress"}
            called = {"call_id": delta.id, "name": delta.name, "arguments": ""}
            events.append(self._open_item(item | called))
        if delta.arguments:
            self._texts.append(delta.arguments)
            kind = "response.function_call_arguments.delta"
            events.append({"type": kind, **self._place, "delta": delta.arguments})
        return events

    def _close(self, status: str = "completed") -> list[Event]:
        """End the item that grows, if one does."""
        if not self._open:
            return []
        self._open = False
        item, text = self.items[-1], "".join(self._texts)
        item["status"] = status
        done = {"type": "response.output_item.done", "output_index": len(self.items) - 1}
        return [*self._whole(item, text), done | {"item": item}]

    def _whole(self, item: dict[str, Any], text: str) -> Sequence[Event]:
        """Tell the text of an item as one."""
        if item["type"] == "function_call":
            item["arguments"] = text
            content = {"name": item["name"], "arguments": text}
            return [{"type": "response.function_call_arguments.done", **self._place, **content}]
        [part] = item["content"]
        part["text"] = text
        place = {**self._place, "content_index": 0}
        content = {"text": text, "logprobs": part["logprobs"]}
        return [
            {"type": "response.output_text.done", **place, **content},
            {"type": "response.content_part.done", **place, "part": part},
        ]


class ModelResponse:
    """The answer to a question as OpenAI tells it.

    Args:
        served: The engine and the tokenizer.
        body: What was asked.
        call: The same as a chat.
    """

    def __init__(self, served: ServedModel, body: ResponsesBody, call: ChatCall) -> None:
        self._texts, self._call = served.texts, call
        self._head = _head(body, body.model or served.settings.model)
        self._items = ResponseItems(self._logprobs)
        self._count = 0  # of events

    async def answer(self) -> dict[str, Any]:
        """All of it."""
        async with aclosing(self._call.parts()) as parts:
            async for _, part in parts:
                self._items.add(part)
                reason = part.finish_reason
        return self._end(reason)[-1]["response"]

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """It in events; what is wrong before the first is an error of its own."""
        try:
            async with aclosing(self._call.parts()) as parts:
                async for _, part in parts:
                    events = [] if self._count else self._begin()
                    events += self._items.add(part)
                    if part.finish_reason is not None:
                        events += self._end(part.finish_reason)
                    yield self._frame(events)
        except PTQError as error:
            if not self._count:
                raise
            yield self._frame([self._failure(error)])

    def _begin(self) -> list[Event]:
        response = self._response("in_progress")
        kinds = ("response.created", "response.in_progress")
        return [{"type": kind, "response": response} for kind in kinds]

    def _end(self, reason: str | None) -> list[Event]:
        status = "incomplete" if reason == "length" else "completed"
        events = self._items.finish(status)
        why = {"reason": "max_output_tokens"} if status == "incomplete" else None
        response = self._response(status, incomplete_details=why)
        return [*events, {"type": f"response.{status}", "response": response}]

    def _failure(self, error: PTQError) -> Event:
        content = {"code": "server_error", "message": api_error(error).message}
        return {"type": "response.failed", "response": self._response("failed", error=content)}

    def _response(self, status: str, **more: Any) -> dict[str, Any]:
        """The response so far."""
        ended = status != "in_progress"
        usage = self._call.usage
        counts = {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": usage.completion,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt + usage.completion,
        }
        content = {"status": status, "output": list(self._items.items) if ended else []}
        content |= {"usage": counts if ended else None}
        return self._head | content | {"completed_at": int(time.time()) if ended else None} | more

    def _logprobs(self, part: Part) -> list[dict[str, Any]]:
        if self._call.top is None:
            return []
        logprobs = chat_logprobs(self._texts, part.token_ids, part.logprobs, self._call.top)
        return logprobs["content"]

    def _frame(self, events: Sequence[Event]) -> bytes:
        """Server-sent events, numbered on."""
        made: list[str] = []
        for event in events:
            numbered = event | {"sequence_number": self._count}
            made.append(f"event: {event['type']}\ndata: {dumps(numbered)}\n\n")
            self._count += 1
        return "".join(made).encode()


def _head(body: ResponsesBody, model: str) -> dict[str, Any]:
    """What is the same as long as a response grows: what was asked, and what stands for nothing."""
    asked = body.model_dump(by_alias=True, exclude_none=True)
    text = asked.get("text", {})
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
        "tool_choice": asked.get("tool_choice", "auto"),
        "tools": asked.get("tools", []),
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "user": body.user,
    }
