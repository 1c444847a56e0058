"""`/generate` and `/generate/stream`: ports of ColossalAI's inference server.

An answer is {"text": ...} without the prompt; a stream is such objects, each with the whole text so
far and ended by a NUL byte.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import Response

from inference.requests.request import SamplingParams
from inference.server.generation.choices import answers, deltas, submit
from inference.server.generation.chunks import Usage
from inference.server.generation.served_model import ServedModel
from inference.server.http.body import read_body
from inference.server.http.responses import EventStream, Json, dumps, unless_gone
from inference.server.schema.generate import GenerateBody


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
