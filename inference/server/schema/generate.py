"""The body of ColossalAI's `/generate` and `/generate/stream`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from inference.server.schema.common import LIMITS, Body, Int


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
        num_beams: Search with so many beams instead.
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
