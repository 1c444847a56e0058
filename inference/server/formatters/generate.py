"""`/generate` and `/generate/stream`: ports of ColossalAI's inference server.

An answer is {"text": ...} without the prompt; a stream is such objects, each with the whole text so
far and ended by a NUL byte.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from inference.beam_search import BeamParams
from inference.requests.request import SamplingParams
from inference.server.call import Call
from inference.server.formatters.formatter import OF_BEAMS, Formatter, answer, refuse_beside
from inference.server.http.responses import dumps
from inference.server.schema.generation import LIMITS, Body, Int
from inference.server.served_model import ServedModel
from inference.server.stream import Delta


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
    seed: Int | None = Field(default=None, ge=0, lt=2**63)
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
        beams = [BeamParams(**own, **body.model_dump(include={*OF_BEAMS}))]
    call = Call(served, [prompt], [params], tuple(body.stop), beams=beams)
    return await answer(request, GenerateFormatter(call), stream=body.streams)


async def generate_stream(request: Request, served: ServedModel, body: GenerateBody) -> Response:
    """Answer `POST /generate/stream`."""
    return await generate(request, served, body.model_copy(update={"stream": True}))


def _check_beams(body: GenerateBody) -> None:
    """Refuse what does not go with a beam search, or goes with nothing else."""
    search, fields = body.num_beams > 1, GenerateBody.model_fields
    names = NOT_OF_BEAMS if search else OF_BEAMS
    given = ["stream"] if search and body.streams else []
    given += [name for name in names if getattr(body, name) != fields[name].default]
    refuse_beside(given, None if search else "num_beams of 2 or more")


class GenerateFormatter(Formatter):
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
