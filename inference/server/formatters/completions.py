"""`/v1/completions` and `/generate`: texts or token ids, completed as they stand.

`/generate` and `/generate/stream` are ports of ColossalAI's inference server: an answer is
{"text": ...} without the prompt; a stream is such objects, each with the whole text so far and
ended by a NUL byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag
from starlette.requests import Request
from starlette.responses import Response

from inference.beam_search import BeamParams
from inference.requests.request import Logprobs, SamplingParams
from inference.server.call import Call, beam_params, sampling_params
from inference.server.formatters import formatter as shared
from inference.server.http.responses import ApiError, dumps, quote
from inference.server.logprobs import CompletionLogprobs
from inference.server.schema.generation import LIMITS, Body, GenerationBody, Int, TokenIds, refused
from inference.server.served_model import ServedModel
from inference.server.stream import Delta

MAX_TOKENS = 16  # OpenAI's default


def _kind(value: Any) -> str:
    """Which of the four kinds of prompts it is, by its first item."""
    if not isinstance(value, list):
        return "text"
    if value and isinstance(value[0], str):
        return "texts"
    return "lists" if value and isinstance(value[0], list) else "ids"


Prompt = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[Annotated[list[str], Field(max_length=LIMITS.prompts)], Tag("texts")]
    | Annotated[TokenIds, Tag("ids")]
    | Annotated[Annotated[list[TokenIds], Field(max_length=LIMITS.prompts)], Tag("lists")],
    Discriminator(_kind),
]


class CompletionBody(GenerationBody):
    """The body of `/v1/completions`: as OpenAI's, and more.

    Attributes:
        prompt: A text, texts, token ids, or lists of token ids.
        suffix: Not supported.
        max_tokens: Most tokens of an answer; with `echo`, 0 only tells of the prompt.
        best_of: Answers to try, of which the `n` with the likeliest tokens are given.
        echo: Give the prompt before the answer.
        logprobs: Tell the log probability of each token, and of the so many likeliest ones.
        add_special_tokens: Let the tokenizer add its own to texts, such as a BOS token.
    """

    prompt: Prompt
    suffix: Annotated[None, refused("texts are completed at their end only")] = None
    max_tokens: Int | None = Field(default=None, ge=0, lt=2**31)
    best_of: Int | None = Field(default=None, ge=1, le=LIMITS.choices)
    echo: bool | None = None
    logprobs: Int | None = Field(default=None, ge=0, le=LIMITS.top_logprobs)
    add_special_tokens: bool | None = None

    def prompts(self) -> list[str] | list[TokenIds]:
        """The prompts, one or more."""
        single = isinstance(self.prompt, str) or _kind(self.prompt) == "ids"
        return [self.prompt] if single else self.prompt  # pyright: ignore[reportReturnType]


async def complete(request: Request, served: ServedModel, body: CompletionBody) -> Response:
    """Answer `POST /v1/completions`."""
    _check(body)
    call, echoes = await _read(served, body)
    formatter = CompletionFormatter(call, body, echoes)
    return await shared.answer(request, formatter, stream=bool(body.stream))


def _check(body: CompletionBody) -> None:
    """Refuse what does not go together."""
    shared.check_beams(body)
    n, best_of = body.n or 1, body.best_of
    if best_of is not None and best_of < n:
        raise ApiError(400, f"best_of: {best_of} is less than n, {n}", "best_of")
    if body.stream and best_of is not None and best_of > n:
        why = "which answers are best is known at their end; leave out stream or best_of"
        raise ApiError(400, f"best_of: {why}", "best_of")
    if body.max_tokens == 0 and not body.echo:
        message = "max_tokens: 0 needs echo, for there is nothing else to tell; give 1 or more"
        raise ApiError(400, message, "max_tokens")
    shared.check_stream(body)


async def _read(served: ServedModel, body: CompletionBody) -> tuple[Call, list[str]]:
    """The call, and what the text of each prompt's answers begins with.

    Raises:
        ApiError, RequestError: a prompt is empty, too long or holds unknown tokens, or a parameter
            is not allowed.
    """

    def tokenize() -> tuple[list[list[int]], list[str]]:
        given, special = body.prompts(), body.add_special_tokens is not False
        ids = [served.encode(prompt, special) for prompt in given]
        if not body.echo:
            return ids, [""] * len(ids)
        return ids, [p if isinstance(p, str) else served.decode(p) for p in given]

    prompts, echoes = await served.in_thread(tokenize)
    n = body.n or 1
    best_of = body.best_of or n
    most = MAX_TOKENS if body.max_tokens is None else max(1, body.max_tokens)
    rooms = [served.check_length(len(prompt), "prompt") for prompt in prompts]
    wanted = 0 if best_of > n and body.logprobs is None else body.logprobs
    common = {
        "logprobs": wanted,
        "prompt_logprobs": body.logprobs if body.echo else None,
        "adapter": served.check_model(body.model),
    }
    params = [sampling_params(body, max_tokens=min(most, room), **common) for room in rooms]
    beams = beam_params(body, params, body.logprobs)
    silent = body.max_tokens == 0
    call = Call(served, prompts, params, body.stops, n, best_of, beams=beams, silent=silent)
    return call, echoes


class CompletionFormatter(shared.ChunkFormatter):
    """Writes completions.

    Args:
        echoes: What the text of each prompt's answers begins with.
    """

    def __init__(self, call: Call, body: CompletionBody, echoes: Sequence[str]) -> None:
        super().__init__(call, body, "cmpl", ("text_completion", "text_completion"))
        self._echoes, self._ids = echoes, body.return_token_ids
        self._plain = not (body.echo or body.return_token_ids or body.logprobs is not None)
        texts, top, count = call.served.texts, body.logprobs, len(call.prompts) * call.n
        self._begun: set[int] = set()  # answers of which a part is written
        self._logprobs: list[CompletionLogprobs] = []  # of each answer
        if top is not None:
            self._logprobs = [CompletionLogprobs(texts, top) for _ in range(count)]

    def events(self, index: int, delta: Delta) -> bytes:
        """A chunk."""
        if self._plain and delta.finish_reason is None:
            text = quote(delta.text)
            choice = f'{{"index":{index},"text":{text},"logprobs":null,"finish_reason":null}}'
            return self.chunk(choice)
        return self.chunk(dumps(self.choice(index, delta)))

    def choice(self, index: int, delta: Delta) -> dict[str, Any]:
        """What an answer gained, or all of it; it begins with the prompt if that is echoed."""
        text, made = delta.text, delta.token_ids
        logprobs: list[Logprobs | None] = list(delta.logprobs or ())
        if self.call.silent:
            text, made, logprobs = "", [], []
        place, first = index // self.call.n, index not in self._begun
        tokens, prompt = made, self.call.prompts[place]
        if first:
            self._begun.add(index)
            text = self._echoes[place] + text
            if delta.prompt_logprobs is not None:
                tokens, logprobs = prompt + tokens, [*delta.prompt_logprobs, *logprobs]
        choice = {
            "index": index,
            "text": text,
            "logprobs": self._logprobs[index].part(tokens, logprobs) if self._logprobs else None,
            "finish_reason": delta.finish_reason,
        }
        if self._ids:
            choice["token_ids"] = made
            if first:
                choice["prompt_token_ids"] = prompt
        return choice


class GenerateBody(Body):
    """The body of `/generate`: a prompt, and fields of transformers' generation config.

    Attributes:
        prompt: A text, completed as it stands.
        stream: Answer in parts, each a JSON object and a NUL byte; also as the text "true".
        max_new_tokens: Most tokens of the answer.
        do_sample: Sample; otherwise the likeliest token is taken.
        temperature: Of sampling.
        top_k: Of the likeliest tokens, so many; 0: all.
        top_p: Of the likeliest tokens, as few as reach this probability.
        min_p: Only tokens at least so likely as this part of the likeliest one's probability.
        repetition_penalty: Divides the logits of tokens of prompt and answer.
        num_beams: Search with so many beams instead, from 2 on; then nothing is sampled.
        length_penalty: Of a beam search.
        early_stopping: Of a beam search.
        seed: Of the random numbers.
        stop: Texts that end the answer.
    """

    prompt: str = Field(min_length=1)
    stream: bool | Literal["true", "false", "True", "False"] = False
    max_new_tokens: Int = Field(default=128, ge=1, lt=2**31)
    do_sample: bool = False
    temperature: float = Field(default=1.0, ge=1e-10, le=1e10)
    top_k: Int = Field(default=0, ge=0, lt=2**31)
    top_p: float = Field(default=1.0, ge=1e-10, le=1)
    min_p: float = Field(default=0.0, ge=0, le=1)
    repetition_penalty: float = Field(default=1.0, ge=1e-10, le=1e10)
    num_beams: Int = Field(default=1, ge=1, le=LIMITS.beam_width)
    length_penalty: float = Field(default=1.0, ge=-10, le=10)
    early_stopping: bool | Literal["never"] = False
    seed: Int | None = Field(default=None, ge=0, le=2**63 - 1)
    stop: list[str] = Field(default=[], max_length=LIMITS.stops)

    @property
    def streams(self) -> bool:
        """Whether the answer comes in parts."""
        return self.stream if isinstance(self.stream, bool) else self.stream.lower() == "true"


SAME = "top_k top_p min_p repetition_penalty seed".split()
NOT_OF_BEAMS = (*SAME, "do_sample", "temperature", "stop")


async def generate(request: Request, served: ServedModel, body: GenerateBody) -> Response:
    """Answer `POST /generate`."""
    _check_beams(body)
    prompt = await served.in_thread(lambda: served.encode(body.prompt))
    params = SamplingParams(
        max_tokens=min(body.max_new_tokens, served.check_length(len(prompt), "prompt")),
        temperature=body.temperature if body.do_sample else 0.0,
        **body.model_dump(include={*SAME}),
    )
    beams = None
    if body.num_beams > 1:
        own = {"beam_width": body.num_beams, "max_tokens": params.max_tokens}
        beams = [BeamParams(**own, **body.model_dump(include={*shared.OF_BEAMS}))]
    call = Call(served, [prompt], [params], tuple(body.stop), beams=beams)
    return await shared.answer(request, GenerateFormatter(call), stream=body.streams)


async def generate_stream(request: Request, served: ServedModel, body: GenerateBody) -> Response:
    """Answer `POST /generate/stream`."""
    return await generate(request, served, body.model_copy(update={"stream": True}))


def _check_beams(body: GenerateBody) -> None:
    """Refuse what does not go with a beam search, or goes with nothing else."""
    search, fields = body.num_beams > 1, GenerateBody.model_fields
    names = NOT_OF_BEAMS if search else shared.OF_BEAMS
    given = ["stream"] if search and body.streams else []
    given += [name for name in names if getattr(body, name) != fields[name].default]
    shared.refuse_beside(given, None if search else "num_beams of 2 or more")


class GenerateFormatter(shared.Formatter):
    """Writes texts."""

    done = quiet = b""

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self._text = ""

    async def whole(self) -> dict[str, Any]:
        """The answer as one object."""
        [made] = await self.call.answers()
        return {"text": made.text}

    def events(self, index: int, delta: Delta) -> bytes:
        """All of the text so far."""
        self._text += delta.text
        return dumps({"text": self._text}).encode() + b"\0"
