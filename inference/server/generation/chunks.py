"""The bytes of a stream's chunks: what is the same in all of a call's is made once."""

from __future__ import annotations

from json.encoder import encode_basestring as _c_encode
from typing import Any

from inference.server.http.errors import ApiError
from inference.server.http.responses import dumps, in_one_line
from inference.server.schema.generation import GenerationBody
from inference.server.stream import Delta


def quote(text: str) -> str:
    """A text as JSON."""
    return in_one_line(_c_encode(text))


def check_stream(body: GenerationBody) -> None:
    """Refuse options of a stream where none is asked for.

    Raises:
        ApiError: 400.
    """
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options: they need stream", "stream_options")


class Usage:
    """Tokens of a call so far.

    Args:
        prompt: Of the prompts.
        speculates: Whether the engine makes drafts, so that the usage counts them.

    Attributes:
        prompt: Of the prompts.
        completion: Of the answers.
        drafts: Drafts of all answers that were computed.
        accepted: Tokens of the answers that were drafts.
    """

    def __init__(self, prompt: int, *, speculates: bool = False) -> None:
        self.prompt, self.completion = prompt, 0
        self._speculates, self.drafts, self.accepted = speculates, 0, 0

    def add(self, gained: Delta) -> None:
        """Count what an answer gained, or all of one."""
        self.completion += len(gained.token_ids)
        self.drafts += gained.drafts
        self.accepted += gained.accepted

    def __str__(self) -> str:
        return f"{self.prompt}+{self.completion}"

    @property
    def content(self) -> dict[str, Any]:
        """As OpenAI's `usage`."""
        total = self.prompt + self.completion
        fields = {"prompt_tokens": self.prompt, "completion_tokens": self.completion}
        content = fields | {"total_tokens": total}
        if not self._speculates:
            return content
        rejected = self.drafts - self.accepted
        of_drafts = {
            "accepted_prediction_tokens": self.accepted,
            "rejected_prediction_tokens": rejected,
        }
        return content | {"completion_tokens_details": of_drafts}


class Chunks:
    """Makes the chunks of one call.

    Args:
        head: Fields that all of them have: `id`, `object`, `created`, `model`.
        body: What was asked; its `stream_options` choose what chunks say of usage.
        usage: Counts, kept by the caller.
    """

    def __init__(self, head: dict[str, Any], body: GenerationBody, usage: Usage) -> None:
        options = body.stream_options
        self._usage = usage
        self._told = bool(options and options.include_usage)
        self._always = self._told and bool(options and options.continuous_usage_stats)
        self._head = f'data: {dumps(head)[:-1]},"choices":['
        self._tail = '],"usage":null}\n\n' if self._told else "]}\n\n"

    def frame(self, choice: str, more: str = "") -> bytes:
        """A chunk with one choice, which is JSON, and further fields, such as `,"key":1`."""
        tail = self._tail
        if self._always:
            tail = f'],"usage":{dumps(self._usage.content)}}}\n\n'
        if more:
            tail = f"]{more}{tail[1:]}"
        return f"{self._head}{choice}{tail}".encode()

    def last(self) -> bytes:
        """The chunk without choices that tells the usage, if it is wanted."""
        if not self._told:
            return b""
        return f'{self._head}],"usage":{dumps(self._usage.content)}}}\n\n'.encode()
