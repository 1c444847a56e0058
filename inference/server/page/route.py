"""`GET /`: the chat page, one file that is read once.

No folder of files is served, so that no path leads out of one. The page's policy lets in its own
style and script, by their hashes, and connections to this server: a text that a model writes can
neither run nor load anything, even where the page's own care (it sets text as text) should fail.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

PAGE = Path(__file__).with_name("index.html")
HEADERS = {
    "Cache-Control": "no-cache",  # asked for again each time, and answered by 304
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


async def chat_page(request: Request) -> Response:
    """Answer `GET /` with the page, or with 304 where the browser has it."""
    body, headers = read_page()
    if headers["ETag"] in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(body, headers=headers, media_type="text/html")


@cache
def read_page() -> tuple[bytes, dict[str, str]]:
    """The page's bytes, and the headers that it is served with."""
    body = PAGE.read_bytes()
    etag = hashlib.sha256(body).hexdigest()[:32]
    return body, {**HEADERS, "Content-Security-Policy": policy(body), "ETag": f'"{etag}"'}


def policy(page: bytes) -> str:
    """The Content-Security-Policy of a page: its own style and script, and nothing else.

    Trusted types are required and none is made: where a browser knows them, HTML made of a text is
    refused. The image is the page's icon, which is written into it.
    """

    def hashes(tag: bytes) -> str:
        inner = re.findall(rb"<%b>(.*?)</%b>" % (tag, tag), page, re.DOTALL)
        digests = (base64.b64encode(hashlib.sha256(text).digest()).decode() for text in inner)
        return " ".join(f"'sha256-{digest}'" for digest in digests)

    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {hashes(b'script')}",
            f"style-src {hashes(b'style')}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    )
