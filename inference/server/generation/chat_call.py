"""One call for answers to a chat: from its messages to what the answers gain."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from inference.server.generation.choices import beam_answers, deltas, submit
from inference.server.generation.chunks import Usage
from inference.server.generation.reader import AnswerReader, Reason
from inference.server.generation.sampling import sampling_params
from inference.server.generation.served_model import ServedModel
from inference.server.http.errors import ApiError
from inference.server.messages import Logprobs
from inference.server.schema.chat import AnyMessage, ChatBody, template_messages
from inference.server.schema.completions import TokenizeBody
from inference.server.schema.generation import constraint_of
from inference.server.tools.parser import MessageDelta
from inference.server.tools.use import ToolUse


def rendered(
    served: ServedModel,
    body: ChatBody | TokenizeBody,
    messages: Sequence[AnyMessage],
    tools: ToolUse | None,
) -> list[int]:
    """Token ids of a chat, through the model's template.

    Raises:
        ApiError, RequestError: there is no template, it refuses the chat, it knows no tools, or the
            chat is too long.
    """
    return served.render(
        template_messages(messages),
        body.chat_template_kwargs,
        answer=body.add_generation_prompt,
        go_on=body.continue_final_message,
        tools=tools and tools.tools,
    )


@dataclass
class Part:
    """What an answer gained, or all of it.

    Attributes:
        deltas: Of its text and its calls. Their text may come later than its tokens.
        token_ids: Its new tokens.
        logprobs: For each of them, {token: log probability}; empty where none are wanted.
        finish_reason: Why it ended; None before.
    """

    deltas: list[MessageDelta] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    finish_reason: Reason | None = None

    def add(self, later: Part) -> None:
        """Append what it gained after this."""
        self.deltas += later.deltas
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.finish_reason = later.finish_reason


class ChatCall:
    """One call, with its chat as token ids; `prepare` makes it.

    Args:
        served: The engine and the tokenizer.
        body: What was asked.
        prompt: Token ids of the chat.
        tools: What the model may call, if anything.

    Attributes:
        body: What was asked.
        prompt: Token ids of the chat.
        top: How many log probabilities each token gets; None for none.
        usage: Tokens so far.

    Raises:
        ApiError: the chat is too long.
        RequestError: a parameter is not allowed.
    """

    def __init__(
        self, served: ServedModel, body: ChatBody, prompt: list[int], tools: ToolUse | None
    ) -> None:
        self._served, self._tools = served, tools
        self.body, self.prompt = body, prompt
        room = served.check_length(len(prompt), "messages")
        most = body.max_completion_tokens or body.max_tokens or room
        self.top = (body.top_logprobs or 0) if body.logprobs else None
        self._params = sampling_params(
            body,
            min(most, room),
            logprobs=self.top,
            constraint=tools and tools.constraint,
            adapter=served.check_model(body.model),
        )
        self.usage = Usage(len(prompt), speculates=served.client.info.speculates)

    @classmethod
    async def prepare(cls, served: ServedModel, body: ChatBody) -> ChatCall:
        """Write the chat by the template and tokenize it.

        Raises:
            ApiError, RequestError: there is no template, it refuses the chat, it knows no tools, or
                the chat is too long.
        """
        tools = ToolUse.of(body, served.tools, constraint_of(body.response_format))
        if tools and tools.constraint and body.beam_width is not None:
            message = "tools: calls that have to be made or to follow a schema need sampling"
            raise ApiError(400, f"{message}; leave out beam_width", "tools", "invalid_value")

        def render() -> list[int]:
            return rendered(served, body, body.messages, tools)

        return cls(served, body, await served.in_thread(render), tools)

    def _readers(self, count: int) -> list[AnswerReader]:
        return [AnswerReader(self._tools and self._tools.parser()) for _ in range(count)]

    async def parts(self) -> AsyncGenerator[tuple[int, Part], None]:
        """What the answers gain, with their indices; raises as `deltas`."""
        count = self.body.n or 1
        readers = self._readers(count)
        streams = submit(self._served, [self.prompt], [self._params], self.body.stops, count)
        constrained_by = "tools" if self._tools and self._tools.constraint else "response_format"
        async with aclosing(deltas(streams, constrained_by)) as given:
            async for index, delta in given:
                self.usage.add(delta)
                gained, reason = readers[index].read(delta.text, delta.finish_reason)
                if readers[index].over:
                    streams[index].cancel()
                yield index, Part(gained, delta.token_ids, delta.logprobs or [], reason)

    async def answers(self) -> Sequence[Part]:
        """All of every answer; raises as `deltas`."""
        if self.body.beam_width is not None:
            return await self._beams()
        gathered = [Part() for _ in range(self.body.n or 1)]
        async with aclosing(self.parts()) as parts:
            async for index, part in parts:
                gathered[index].add(part)
        return gathered

    async def _beams(self) -> Sequence[Part]:
        most = [self._params.max_tokens]
        made = await beam_answers(self._served, [self.prompt], self.body, most, self.top)
        parts: list[Part] = []
        for answer, reader in zip(made, self._readers(len(made)), strict=True):
            self.usage.add(answer)
            gained, reason = reader.read(answer.text, answer.finish_reason)
            parts.append(Part(gained, answer.token_ids, answer.logprobs or [], reason))
        return parts
