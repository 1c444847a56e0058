"""`/v1/chat/completions`: chats, written by the model's template."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from inference.server.call import Call, beam_params, sampling_params
from inference.server.formatters.formatter import ChunkFormatter, answer, check_beams, check_stream
from inference.server.http.responses import ApiError, dumps, quote
from inference.server.logprobs import chat_logprobs
from inference.server.schema import generation as base
from inference.server.schema.chat import AnyMessage, TemplateBody, ToolFields
from inference.server.served_model import ServedModel
from inference.server.stream import Delta
from inference.server.tools.parser import CallDelta, MessageDelta, join_deltas
from inference.server.tools.use import ToolUse


class ChatBody(base.GenerationBody, TemplateBody, ToolFields):
    """The body of `/v1/chat/completions`: as OpenAI's, and more.

    Attributes:
        messages: What was said.
        max_completion_tokens: Most tokens of an answer; default what the context leaves.
        max_tokens: Its older name.
        logprobs: Tell the log probability of each token.
        top_logprobs: And those of the so many likeliest ones.
    """

    messages: list[AnyMessage] = Field(min_length=1, max_length=4096)
    max_completion_tokens: base.Int | None = Field(default=None, ge=1, lt=2**31)
    max_tokens: base.Int | None = Field(default=None, ge=1, lt=2**31)
    logprobs: bool | None = None
    top_logprobs: base.Int | None = Field(default=None, ge=0, le=base.LIMITS.top_logprobs)
    modalities: list[Literal["text"]] | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: Annotated[bool | None, base.refused_if_true("no answer is stored")] = None
    verbosity: Literal["medium"] | None = None
    safety_identifier: str | None = Field(default=None, max_length=512)
    prompt_cache_key: str | None = Field(default=None, max_length=512)
    prompt_cache_retention: Literal["in_memory", "in-memory"] | None = None
    audio: Annotated[None, base.refused("this model writes text only")] = None
    web_search_options: Annotated[None, base.refused("this server does not search")] = None
    metadata: Annotated[
        Annotated[dict[str, str], Field(max_length=0)] | None,
        base.refused_unless_empty("it belongs to stored completions, and none is stored"),
    ] = None
    reasoning_effort: Annotated[
        None, base.refused("give what the template knows in chat_template_kwargs")
    ] = None
    functions: Annotated[None, base.refused("use tools")] = None
    function_call: Annotated[None, base.refused("use tool_choice")] = None


async def chat(request: Request, served: ServedModel, body: ChatBody) -> Response:
    """Answer `POST /v1/chat/completions`."""
    _check(body)
    call = await chat_call(served, body)
    return await answer(request, ChatFormatter(call, body), stream=bool(body.stream))


def _check(body: ChatBody) -> None:
    """Refuse what does not go together."""
    check_beams(body)
    if body.max_tokens not in (None, body.max_completion_tokens or body.max_tokens):
        message = "max_tokens: it is the older name of max_completion_tokens; give one of them"
        raise ApiError(400, message, "max_tokens")
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs: they need logprobs to be true", "top_logprobs")
    check_stream(body)


async def chat_call(served: ServedModel, body: ChatBody) -> Call:
    """What the engine is asked for answers to a chat.

    Raises:
        ApiError, RequestError: as `ServedModel.render`, or a parameter is not allowed.
    """
    tools = ToolUse.of(body, served.tools, base.constraint_of(body.response_format))
    if tools and tools.constraint and body.beam_width is not None:
        message = "tools: calls that have to be made or to follow a schema need sampling"
        raise ApiError(400, f"{message}; leave out beam_width", "tools", "invalid_value")
    prompt = await served.in_thread(lambda: served.render(body.messages, body, tools))
    room, n = served.check_length(len(prompt), "messages"), body.n or 1
    top = (body.top_logprobs or 0) if body.logprobs else None
    params = sampling_params(
        body,
        max_tokens=min(body.max_completion_tokens or body.max_tokens or room, room),
        logprobs=top,
        constraint=tools and tools.constraint,
        adapter=served.check_model(body.model),
    )
    beams = beam_params(body, [params], top)
    return Call(served, [prompt], [params], body.stops, n, n, tools, beams)


class ChatFormatter(ChunkFormatter):
    """Writes chats."""

    def __init__(self, call: Call, body: ChatBody) -> None:
        super().__init__(call, body, "chatcmpl", ("chat.completion", "chat.completion.chunk"))
        self._ids, self._top = body.return_token_ids, call.params[0].logprobs
        self._begun: set[int] = set()  # answers whose role is written

    async def whole(self) -> dict[str, Any]:
        """All answers as one object."""
        ids = {"prompt_token_ids": self.call.prompts[0]} if self._ids else {}
        return await super().whole() | ids

    def choice(self, index: int, whole: Delta) -> dict[str, Any]:
        """An answer as one."""
        text, calls = join_deltas(whole.parts)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message["tool_calls"] = [_call(call) for call in calls]
        content = {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(whole),
            "finish_reason": whole.finish_reason,
        }
        return content | ({"token_ids": whole.token_ids} if self._ids else {})

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        if self._top is None:
            return None
        texts, known = self.call.served.texts, delta.logprobs or ()
        return chat_logprobs(texts, delta.token_ids, known, self._top)

    def events(self, index: int, delta: Delta) -> bytes:
        """Chunks: at first one with the role, then of its text and calls, at last of its end."""
        made = b""
        if index not in self._begun:
            self._begun.add(index)
            more = ""
            if self._ids and index == 0:
                more = f',"prompt_token_ids":{dumps(self.call.prompts[0])}'
            made = self.chunk(_piece(index, {"role": "assistant", "content": None}), more)
        made += b"".join(map(self.chunk, self._pieces(index, delta)))
        if delta.finish_reason is not None:
            made += self.chunk(_piece(index, {}, None, delta.finish_reason))
        return made

    def _pieces(self, index: int, delta: Delta) -> Iterator[str]:
        """The choices of its chunks; the first has what is asked of its tokens."""
        ids = delta.token_ids if self._ids else None
        more = self._top is not None or self._ids
        parts: Sequence[MessageDelta] = delta.parts
        if not parts and (delta.logprobs or ids):
            parts = [""]
        for part in parts:
            if more:
                yield _piece(index, _gain(part), self._logprobs(delta), None, ids)
            elif isinstance(part, str):  # nearly all of them
                yield (
                    f'{{"index":{index},"delta":{{"content":{quote(part)}}},'
                    '"logprobs":null,"finish_reason":null}'
                )
            else:
                yield _piece(index, _gain(part))
            more = False


def _gain(part: MessageDelta) -> dict[str, Any]:
    """What a message gains; the first part of a call has its id and its name."""
    if isinstance(part, str):
        return {"content": part}
    return {"tool_calls": [{"index": part.index} | _call(part)]}


def _call(part: CallDelta) -> dict[str, Any]:
    if part.id is None:
        return {"function": {"arguments": part.arguments}}
    function = {"name": part.name, "arguments": part.arguments}
    return {"id": part.id, "type": "function", "function": function}


def _piece(
    index: int,
    delta: dict[str, Any],
    logprobs: dict[str, Any] | None = None,
    reason: str | None = None,
    token_ids: Sequence[int] | None = None,
) -> str:
    """The choice of a chunk."""
    content = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
    return dumps(content if token_ids is None else content | {"token_ids": token_ids})
