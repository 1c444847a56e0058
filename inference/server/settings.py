"""What the command line says to the HTTP process of a server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Limits:
    """What a client may ask for at most; beyond it a request is refused, by name.

    Attributes:
        body_bytes: Of a request's body.
        header_bytes: Of a request's line and headers.
        choices: `n` and `best_of`.
        prompts: Prompts of one request.
        stops: Stop texts of one request.
        stop_characters: Of one stop text.
        top_logprobs: Log probabilities of a token.
        beam_width: Beams of a search.
        prediction_characters: Of a predicted output.
        read_seconds: In which a request's body must have come.
        write_seconds: In which a client must have read something of what waits for it; one that
            does not is dropped.
    """

    body_bytes: int = 32 * 2**20
    header_bytes: int = 64 * 2**10
    choices: int = 16
    prompts: int = 256
    stops: int = 16
    stop_characters: int = 256
    top_logprobs: int = 20
    beam_width: int = 16
    prediction_characters: int = 256 * 2**10
    read_seconds: float = 60.0
    write_seconds: float = 60.0


@dataclass(frozen=True)
class ServerSettings:
    """What the HTTP process has to know.

    Attributes:
        model: The name that clients call the model by; the first of `--served-model-name`.
        aliases: Other names that mean it.
        load_tokenizer: Gives a transformers tokenizer, a new one with every call, since one of them
            must not be used by two threads at once. Raises CheckpointError.
        created: When the server was started, seconds since 1970.
        chat_template: Jinja text in the place of the tokenizer's own, or None.
        special_tokens_in_content: Let texts of messages hold control tokens.
        tool_format: Name of the format in which the model writes calls of tools; None finds it out
            from the chat template.
        api_key: What clients have to show, or None where all may come.
        root_path: Prefix below which all routes answer, too, such as `/llm`; empty for none.
        cors_origins: Web pages from elsewhere that may call, such as `https://example.org`, or `*`.
        log_requests: Log a line a request: route, status, tokens, seconds.
    """

    model: str
    load_tokenizer: Callable[[], Any]
    aliases: tuple[str, ...] = ()
    created: int = 0
    chat_template: str | None = None
    special_tokens_in_content: bool = False
    tool_format: str | None = None
    api_key: str | None = None
    root_path: str = ""
    cors_origins: tuple[str, ...] = ()
    log_requests: bool = False
    log_texts: bool = False
    limits: Limits = Limits()

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the model."""
        return self.model, *self.aliases
