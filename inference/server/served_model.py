"""What the routes work with: the engine's client, the settings, the tokenizer and its template.

Fields of a chat that its template leaves out are refused, as no model would see them. To find them
a chat is rendered a second time with marks in the place of what is in question; what has no mark in
the result is taken out for a third time, and where that changes nothing, it is not used. Only what
may not be lost is looked at: not what an assistant thought, which templates leave out of earlier
turns on purpose, nor what it said beside its calls, which some formats have no place for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn, TypeVar

from formats.chat_template import (
    check_chat_template,
    has_chat_template,
    render_chat,
    template_messages,
    template_variables,
)
from formats.errors import RequestError, suggestion
from inference.prompts import PromptFormat
from inference.requests.request import check_tokens
from inference.server.fleet import ServedEngine
from inference.server.http.responses import ApiError
from inference.server.logprobs import TokenTexts
from inference.server.metrics import Metrics
from inference.server.schema.chat import AnyMessage, TemplateBody
from inference.server.settings import ServerSettings
from inference.server.tools.use import ToolUse, tool_support

Chat = list[dict[str, Any]]
Place = tuple[int, str, int | None]  # of a message, its field, and the number of a call
OF_THE_SERVER = frozenset(  # what apply_chat_template takes beside the template's variables
    "conversation messages tools documents chat_template add_generation_prompt tokenize padding "
    "continue_final_message truncation max_length return_tensors return_dict tokenizer_kwargs "
    "return_assistant_tokens_mask add_special_tokens".split()
)
TRIED = 16  # renderings that make sure
REMEDIES = {
    "content": "change its role, or move what it says into a message of another role",
    "name": "write the name into the content",
    "tool_calls": "write into the content what was called",
}


def check_variables(given: Mapping[str, Any], known: frozenset[str]) -> None:
    """Check that a template looks up all variables that a chat gives.

    Raises:
        RequestError: one is the server's own, or unknown to the template.
    """
    for name in given:
        field = f"chat_template_kwargs.{name}"
        if name in OF_THE_SERVER:
            raise RequestError(f"{field}: it is no variable of a template", "chat_template_kwargs")
        if name not in known:
            hint = suggestion(name, sorted(known - OF_THE_SERVER)) if known - OF_THE_SERVER else ""
            raise RequestError(
                f"{field}: the model's chat template has no such variable, so that it would change "
                f"nothing; leave it out{hint and '. ' + hint}",
                "chat_template_kwargs",
            )


def check_used(render: Callable[[Chat], str], chat: Chat, text: str) -> None:
    """Check that a template writes what messages hold.

    Args:
        render: Gives the text of a chat; raises ValueError where the template refuses it.
        chat: As templates take it.

    Raises:
        RequestError: it leaves a field out, which is named.
    """
    places = [*_unseen(chat, text), *_named(chat)]
    if not places:
        return
    marks = {place: f"zq{number}qz" for number, place in enumerate(places)}
    marked = _rendered(render, _changed(chat, marks))
    left = [place for place, mark in marks.items() if mark not in (marked or "")]
    for place in left[:TRIED]:
        if _rendered(render, _changed(chat, {place: None})) == text:
            _refuse(place, chat)


def _unseen(chat: Chat, text: str) -> list[Place]:
    """Messages, but for the assistant's, whose text does not follow that of the one before.

    None where that is so of all: such a template writes something else in their place.
    """
    end, left = 0, []
    for i, message in enumerate(chat):
        if message["role"] == "assistant":
            continue
        said = message["content"].strip()
        found = text.find(said, end)
        if found >= 0:
            end = found + len(said)
        elif len(left) < TRIED:
            left.append((i, "content", None))
    return left if end else []


def _named(chat: Chat) -> Iterator[Place]:
    """Calls, and names, but for those of tools that their calls tell."""
    called: dict[str, str] = {}
    for i, message in enumerate(chat):
        if message.get("name") not in (None, "", called.get(message.get("tool_call_id", ""))):
            yield i, "name", None
        for number, call in enumerate(message.get("tool_calls", ())):
            called[call["id"]] = call["function"]["name"]
            yield i, "tool_calls", number


def _changed(chat: Chat, changes: Mapping[Place, str | None]) -> Chat:
    """A chat with other texts in some places; None, for one of them, takes away what is there."""
    made = [dict(message) for message in chat]
    for (i, field, number), text in changes.items():
        if field == "content":
            made[i][field] = text or ""
            continue
        value: Any = text
        if number is not None:
            calls = list(made[i][field])
            function = {**calls[number]["function"], "name": text}
            calls[number : number + 1] = (
                [] if text is None else [calls[number] | {"function": function}]
            )
            value = calls
        made[i].pop(field)
        if value:  # templates ask whether there is such a field
            made[i][field] = value
    return made


def _rendered(render: Callable[[Chat], str], chat: Chat) -> str | None:
    """The text of a chat, or None where the template refuses it."""
    try:
        return render(chat)
    except ValueError:
        return None


def _refuse(place: Place, chat: Chat) -> NoReturn:
    i, field, number = place
    name = f"messages[{i}].{field}"
    if number is not None and len(chat[i][field]) > 1:
        name += f"[{number}]"
    raise RequestError(
        f"{name}: the model's chat template leaves it out of a message of role "
        f"{chat[i]['role']!r}, so that the model would not see it; {REMEDIES[field]}, or start the "
        "server with `--chat-template FILE`, a template that writes it",
        name,
    )


Value = TypeVar("Value")
SHORTENED = 2  # characters of a text for each that is left where its tokenizer normalizes it


class ServedModel:
    """What the routes work with.

    Texts are tokenized in a thread with a tokenizer of its own, so that a long one holds no stream
    up; the event loop's decodes.

    Attributes:
        tokenizer: Of the event loop; decodes.
        texts: Of single tokens.

    Raises:
        CheckpointError: the tokenizer cannot be loaded.
        RequestError: the chat template cannot be read.
    """

    def __init__(self, client: ServedEngine, settings: ServerSettings) -> None:
        self.client, self.settings = client, settings
        self.metrics = Metrics(client, settings.model)
        self.tokenizer = settings.load_tokenizer()
        self.texts = TokenTexts(self.tokenizer)
        self._encoder = settings.load_tokenizer()
        if settings.chat_template is not None:
            self._encoder.chat_template = settings.chat_template
        self.has_template = has_chat_template(self._encoder)
        try:
            if self.has_template:
                check_chat_template(self._encoder)
        except ValueError as error:
            message = f"{error}. Mend it, or give another: --chat-template FILE"
            raise RequestError(message) from error
        self._variables = template_variables(self._encoder) if self.has_template else frozenset()
        self.tools = tool_support(self._encoder, settings.tool_format)
        self._format = PromptFormat.of(
            self._encoder, raw=True, special_tokens_in_content=settings.special_tokens_in_content
        )
        self._longest = max(map(len, self._encoder.get_vocab()))
        self._thread = ThreadPoolExecutor(1, "tokenizer")

    async def in_thread(self, work: Callable[[], Value]) -> Value:
        """What `work` gives, done in the tokenizer's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def check_model(self, name: str | None) -> str | None:
        """The adapter that is meant by the name of a model; None for the model itself.

        Raises:
            ApiError: 404: it is not served.
            Unavailable: the model is loading, so that its adapters are not known.
        """
        if name is None or name in self.settings.names:
            return None
        adapters = self.client.adapters
        if name not in adapters:
            known = " and ".join(map(repr, (*self.settings.names, *adapters)))
            message = f"model: there is no {name!r}; this server has {known}"
            raise ApiError(404, message, "model", "model_not_found")
        return name

    def encode(self, prompt: str | Sequence[int], special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt; for the tokenizer's thread.

        Raises:
            ApiError, RequestError: it is empty, or longer than any context.
        """
        if not prompt:
            raise RequestError("prompt: it is empty; give at least one token", "prompt")
        if not isinstance(prompt, str):
            return list(prompt)
        self._check_text(prompt, "prompt")
        if special_tokens:
            return self._format.tokens(prompt)
        return self._format.continuation_tokens(prompt)

    def _check_text(self, text: str, param: str) -> None:
        """Refuse a text that is too long for the context in any case, before it is encoded."""
        most = self.client.info.max_model_len
        if len(text) > most * self._longest * SHORTENED:
            which = f"each of at most {self._longest}"
            raise _too_long(param, f"{len(text)} characters", most, which)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of a prompt's token ids, without special tokens; for the tokenizer's thread.

        Raises:
            RequestError: the model does not know one.
        """
        check_tokens(tokens, self.client.info.vocab_size, "prompt")
        return self._encoder.decode(list(tokens), skip_special_tokens=True)

    def render(
        self, messages: Sequence[AnyMessage], body: TemplateBody, tools: ToolUse | None
    ) -> list[int]:
        """Token ids of a chat by the model's template; for the tokenizer's thread.

        Args:
            tools: What the template tells the model of, if anything.

        Raises:
            ApiError, RequestError: there is no template, it refuses the chat or leaves something of
                it out, or the chat is longer than any context.
        """
        if not self.has_template:
            raise RequestError(
                "messages: this model has no chat template. Start the server with "
                "--chat-template FILE, or complete text: POST /v1/completions",
                "messages",
            )
        answer, go_on = body.add_generation_prompt, body.continue_final_message
        options = dict(body.chat_template_kwargs or {})
        check_variables(options, self._variables)
        if answer and go_on:
            raise RequestError(
                "continue_final_message: the answer either begins or goes on; with it, set "
                "add_generation_prompt to false",
                "continue_final_message",
            )
        if go_on:
            options["continue_final_message"] = True
        chat = template_messages(m.model_dump(exclude_none=True) for m in messages)
        if "developer" not in str(self._encoder.chat_template):  # the newer name of `system`
            for message in chat:
                if message["role"] == "developer":
                    message["role"] = "system"
        more = {"tools": tools and tools.tools, "answer": answer}

        def render(chat: Sequence[Mapping[str, Any]]) -> str:
            return render_chat(self._encoder, chat, options, **more)

        def check(text: str) -> None:
            self._check_text(text, "messages")
            check_used(render, chat, text)

        try:
            return self._format.chats.tokens(chat, options, **more, check=check)
        except ValueError as error:
            raise RequestError(f"messages: {error}", "messages") from error

    def tokenizer_info(self) -> dict[str, Any]:
        """What clients without the tokenizer ask of it, by the names of tokenizer_config.json."""
        known = self.tokenizer.special_tokens_map
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        return {
            "tokenizer_class": type(self.tokenizer).__name__,
            "model_max_length": self.client.info.max_model_len,
            "vocab_size": self.client.info.vocab_size,
            "chat_template": self._encoder.chat_template if self.has_template else None,
        } | {name: None if known.get(name) is None else str(known[name]) for name in names}

    def check_length(self, tokens: int, param: str) -> int:
        """How many tokens the context leaves after a prompt of so many.

        Raises:
            ApiError: 400: none.
        """
        most = self.client.info.max_model_len
        if tokens >= most:
            raise _too_long(param, f"{tokens} tokens", most, "of which one is for the answer")
        return most - tokens

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def _too_long(param: str, found: str, most: int, which: str) -> ApiError:
    message = (
        f"{param}: it has {found}, and this model's maximum context length is {most} tokens, "
        f"{which}; shorten it"
    )
    return ApiError(400, message, param, "context_length_exceeded")
