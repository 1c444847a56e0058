"""`/tokenize`, `/detokenize` and `/tokenizer_info`: the tokenizer for those who have none."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from inference.requests.request import check_tokens
from inference.server.generation.chat_call import rendered
from inference.server.generation.served_model import ServedModel
from inference.server.http.body import read_body
from inference.server.http.responses import Json, unless_gone
from inference.server.schema.chat import ToolFields
from inference.server.schema.completions import DetokenizeBody, TokenizeBody
from inference.server.tools.use import ToolUse


async def tokenize(request: Request, served: ServedModel) -> Response:
    """Answer `POST /tokenize`."""
    body = await read_body(request, TokenizeBody, served.settings.limits)
    served.check_model(body.model)

    tools = ToolUse.of(ToolFields(tools=body.tools), served.tools)

    def work() -> list[int]:
        if body.messages is None:
            prompt = body.prompt or ""
            return served.encode(prompt, body.add_special_tokens is not False) if prompt else []
        return rendered(served, body, body.messages, tools)

    tokens = await unless_gone(request, served.in_thread(work))
    content = {
        "tokens": tokens,
        "count": len(tokens),
        "max_model_len": served.client.info.max_model_len,
        "token_strs": None,
    }
    if body.return_token_strs:
        content["token_strs"] = [served.texts.text(token) for token in tokens]
    return Json(content)


async def detokenize(request: Request, served: ServedModel) -> Response:
    """Answer `POST /detokenize`."""
    body = await read_body(request, DetokenizeBody, served.settings.limits)
    served.check_model(body.model)
    check_tokens(body.tokens, served.client.info.vocab_size, "tokens")
    work = served.in_thread(lambda: served.decode(body.tokens))
    return Json({"prompt": await unless_gone(request, work)})


async def tokenizer_info(request: Request, served: ServedModel) -> Response:
    """Answer `GET /tokenizer_info`: what lm-eval's remote tokenizer reads, as vLLM tells it."""
    return Json(served.tokenizer_info())
