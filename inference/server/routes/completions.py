"""`/v1/completions`: texts or token ids, completed as they stand.

`/generate` and `/generate/stream`: ports of ColossalAI's inference server.

An answer is {"text": ...} without the prompt; a stream is such objects, each with the whole text so
far and ended by a NUL byte.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from inference.requests.request import SamplingParams
from inference.server.generation.choices import answers, beam_answers, check_beams, deltas, submit
from inference.server.generation.chunks import Chunks, Usage, check_stream, quote
from inference.server.generation.logprobs import CompletionLogprobs, TokenTexts
from inference.server.generation.sampling import sampling_params
from inference.server.generation.served_model import ServedModel
from inference.server.http.body import read_body
from inference.server.http.errors import ApiError
from inference.server.http.responses import EventStream, Json, dumps, unless_gone
from inference.server.messages import Logprobs
from inference.server.schema.completions import CompletionBody, GenerateBody
from inference.server.stream import Delta, DeltaStream

MAX_TOKENS = 16  # OpenAI's default


async def complete(request: Request, served: ServedModel) -> Response:
    """Answer `POST /v1/completions`."""
    body = await read_body(request, CompletionBody, served.settings.limits)
    served.check_model(body.model)
    _check(body)
    call = await unless_gone(request, Completion.prepare(served, body))
    request.state.log["tokens"] = call.usage
    if body.stream:
        return EventStream(call.frames(), served.settings.limits.write_seconds)
    return Json(await unless_gone(request, call.answer()))


def _check(body: CompletionBody) -> None:
    """Refuse what does not go together."""
    check_beams(body)
    n, best_of = body.n or 1, body.best_of
    if best_of is not None and best_of < n:
        raise ApiError(400, f"best_of: {best_of} is less than n, {n}", "best_of")
    if body.stream and best_of is not None and best_of > n:
        message = (
            "best_of: which answers are best is known at their end; leave out stream or best_of"
        )
        raise ApiError(400, message, "best_of")
    if body.max_tokens == 0 and not body.echo:
        message = "max_tokens: 0 needs echo, for there is nothing else to tell; give 1 or more"
        raise ApiError(400, message, "max_tokens")
    check_stream(body)


class Completion:
    """One call, with its prompts as token ids.

    Args:
        served: The engine and the tokenizer.
        body: What was asked.
        prompts: Token ids of each prompt.
        echoes: What the text of each prompt's answers begins with.

    Attributes:
        body: What was asked.
        prompts: Token ids of each prompt.
        echoes: What the text of each prompt's answers begins with.
        silent: Whether no token is returned, only the prompts' log probabilities.
        usage: Tokens so far.

    Raises:
        ApiError: a prompt is too long.
        RequestError: a parameter is not allowed.
    """

    def __init__(
        self,
        served: ServedModel,
        body: CompletionBody,
        prompts: Sequence[list[int]],
        echoes: Sequence[str],
    ) -> None:
        self._served, self.body, self.prompts, self.echoes = served, body, prompts, echoes
        self.silent = body.max_tokens == 0  # the engine makes one token all the same
        self._n = body.n or 1
        self._each = body.best_of or self._n
        most = MAX_TOKENS if body.max_tokens is None else max(1, body.max_tokens)
        rooms = [served.check_length(len(prompt), "prompt") for prompt in prompts]
        compared = 0 if self._each > self._n else None
        wanted = compared if body.logprobs is None else body.logprobs
        echoed = body.logprobs if body.echo else None
        adapter = served.check_model(body.model)
        self._params = [
            sampling_params(
                body, min(most, room), logprobs=wanted, prompt_logprobs=echoed, adapter=adapter
            )
            for room in rooms
        ]
        speculates = served.client.info.speculates
        self.usage = Usage(sum(map(len, prompts)), speculates=speculates)
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": body.model or served.settings.model,
        }

    @classmethod
    async def prepare(cls, served: ServedModel, body: CompletionBody) -> Completion:
        """Tokenize the prompts.

        Raises:
            ApiError, RequestError: a prompt is empty, too long or holds unknown tokens.
        """

        def tokenize() -> tuple[list[list[int]], list[str]]:
            given, special = body.prompts(), body.add_special_tokens is not False
            ids = [served.encode(prompt, special) for prompt in given]
            if not body.echo:
                return ids, [""] * len(ids)
            return ids, [p if isinstance(p, str) else served.decode(p) for p in given]

        return cls(served, body, *await served.in_thread(tokenize))

    def _submit(self) -> list[DeltaStream]:
        return submit(self._served, self.prompts, self._params, self.body.stops, self._each)

    async def _search(self) -> list[Delta]:
        most = [params.max_tokens for params in self._params]
        return await beam_answers(self._served, self.prompts, self.body, most, self.body.logprobs)

    def _choices(self) -> list[Choice]:
        """Those that are returned: n for each prompt."""
        places = [place for place in range(len(self.prompts)) for _ in range(self._n)]
        texts = self._served.texts
        return [Choice(self, texts, index, place) for index, place in enumerate(places)]

    async def answer(self) -> dict[str, Any]:
        """All of it."""
        if self.body.beam_width is not None:
            made = await self._search()
        else:
            made = await answers(self._submit())
        best: list[Delta] = []
        for place in range(0, len(made), self._each):
            group = made[place : place + self._each]
            if self._each > self._n:
                group = sorted(group, key=lambda answer: -answer.mean_logprob)[: self._n]
            best += group
        if not self.silent:
            for answer in made:
                self.usage.add(answer)
        pairs = zip(self._choices(), best, strict=True)
        parts = [choice.part(answer) for choice, answer in pairs]
        return self._head | {"choices": parts, "usage": self.usage.content}

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """It in parts."""
        chunks, usage = Chunks(self._head, self.body, self.usage), self.usage
        plain = not (self.body.echo or self.body.return_token_ids or self.body.logprobs is not None)
        choices = self._choices()
        async with aclosing(deltas(self._submit())) as parts:
            async for index, delta in parts:
                if not self.silent:
                    usage.add(delta)
                if plain and delta.finish_reason is None:
                    text = quote(delta.text)
                    choice = (
                        f'{{"index":{index},"text":{text},"logprobs":null,"finish_reason":null}}'
                    )
                    yield chunks.frame(choice)
                    continue
                yield chunks.frame(dumps(choices[index].part(delta)))
        if last := chunks.last():
            yield last


class Choice:
    """One answer as it is returned, in parts or as one.

    Args:
        call: The call that it is of.
        texts: Of tokens.
        index: Its place among the choices.
        place: Its prompt's place among the prompts.
    """

    def __init__(self, call: Completion, texts: TokenTexts, index: int, place: int) -> None:
        body = call.body
        self._body, self._silent = body, call.silent
        self._index, self._prompt = index, call.prompts[place]
        self._echo = call.echoes[place]
        self._logprobs = None
        if body.logprobs is not None:
            self._logprobs = CompletionLogprobs(texts, body.logprobs)
        self._first = True

    def part(self, delta: Delta) -> dict[str, Any]:
        """What it gained, or all of it; the first part begins with the prompt if it is echoed."""
        text, tokens = delta.text, delta.token_ids
        logprobs: list[Logprobs | None] = list(delta.logprobs or ())
        if self._silent:
            text, tokens, logprobs = "", [], []
        made = tokens
        if self._first:
            text = self._echo + text
            if delta.prompt_logprobs is not None:
                tokens, logprobs = self._prompt + tokens, [*delta.prompt_logprobs, *logprobs]
        part: dict[str, Any] = {
            "index": self._index,
            "text": text,
            "logprobs": self._logprobs and self._logprobs.part(tokens, logprobs),
            "finish_reason": delta.finish_reason,
        }
        if self._body.return_token_ids:
            part["token_ids"] = made
            if self._first:
                part["prompt_token_ids"] = self._prompt
        self._first = False
        return part


async def generate(request: Request, served: ServedModel) -> Response:
    """Answer `POST /generate`."""
    return await _answer(request, served, streams=False)


async def generate_stream(request: Request, served: ServedModel) -> Response:
    """Answer `POST /generate/stream`."""
    return await _answer(request, served, streams=True)


async def _answer(request: Request, served: ServedModel, *, streams: bool) -> Response:
    body = await read_body(request, GenerateBody, served.settings.limits)
    prompt = await unless_gone(request, served.in_thread(lambda: served.encode(body.prompt)))
    params = _params(body, served.check_length(len(prompt), "prompt"))
    usage = request.state.log["tokens"] = Usage(len(prompt))
    if streams or body.streams:
        frames = _frames(served, prompt, params, tuple(body.stop), usage)
        seconds = served.settings.limits.write_seconds
        return EventStream(frames, seconds, done=b"", quiet=b"")

    async def work() -> str:
        made = await answers(submit(served, [prompt], [params], tuple(body.stop)))
        usage.add(made[0])
        return made[0].text

    return Json({"text": await unless_gone(request, work())})


def _params(body: GenerateBody, room: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=min(body.max_new_tokens, room),
        temperature=body.temperature if body.do_sample else 0.0,
        top_k=body.top_k,
        top_p=body.top_p,
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        seed=body.seed,
    )


async def _frames(
    served: ServedModel,
    prompt: list[int],
    params: SamplingParams,
    stops: tuple[str, ...],
    usage: Usage,
) -> AsyncGenerator[bytes, None]:
    text = ""
    async with aclosing(deltas(submit(served, [prompt], [params], stops))) as parts:
        async for _, delta in parts:
            text += delta.text
            usage.add(delta)
            yield dumps({"text": text}).encode() + b"\0"
