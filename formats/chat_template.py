"""Chats and texts, as a tokenizer takes them.

A chat is a list of messages. Two spellings are read, and may stand in one file:

    [{"role": "user", "content": "Hello"}, ...]      OpenAI's, which templates take
    [{"from": "human", "value": "Hello"}, ...]       ShareGPT's

Speakers of the second become roles by `ROLES`. A template writes its own special tokens, a BOS
token included: what it renders is tokenized without adding any a second time (`text_tokens`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

# ShareGPT's `from`, as its variants spell it, to the role that templates know.
ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "function_response": "tool",
    "observation": "tool",
}
FOREIGN_ROLES = ("human", "gpt", "chatgpt", "bing", "bard")  # of ROLES, unknown to templates

GENERATION = re.compile(r"{%[-+]?\s*(end)?generation\s*[-+]?%}")  # a mark of transformers' own


SPELLINGS = '{"role": "user", "content": text} or {"from": "human", "value": text}'


def read_messages(chat: Any) -> list[dict[str, Any]]:
    """A chat in either spelling, or as JSON in a text, as `template_messages` makes it.

    Raises:
        ValueError: it is no list of messages, or a speaker is not among `ROLES`.
    """
    chat = _spelled_out(chat)
    if not isinstance(chat, Sequence) or isinstance(chat, str) or not chat:
        found = type(chat).__name__ if chat else repr(chat)
        raise ValueError(f"found {found}; a chat is a list of messages, {SPELLINGS}")
    return template_messages(_read_message(message, i) for i, message in enumerate(chat, 1))


def _spelled_out(chat: Any) -> Any:
    """A chat that a text spells as JSON, as tables of text alone have it; else what it was."""
    if isinstance(chat, str) and chat.lstrip()[:1] == "[":
        with suppress(ValueError, RecursionError):
            return json.loads(chat)
    return chat


def looks_like_chat(value: Any, *, answers: bool = False) -> bool:
    """Whether a value is spelled as a whole chat is: it begins with a message, no answer.

    Args:
        answers: Take what begins with an answer, too.
    """
    value = _spelled_out(value)
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        return False
    first = value[0]
    if not isinstance(first, Mapping):
        return False
    speaker = first.get("role", first.get("from"))
    whole = isinstance(speaker, str) and (answers or ROLES.get(speaker) != "assistant")
    return whole and bool({"content", "value"} & first.keys())


def _read_message(message: Any, place: int) -> dict[str, Any]:
    if isinstance(message, Mapping):
        if isinstance(message.get("role"), str) and {"content", "tool_calls"} & message.keys():
            role = message["role"]
            return {**message, "role": ROLES[role] if role in FOREIGN_ROLES else role}
        speaker, text = message.get("from"), message.get("value")
        if isinstance(speaker, str) and isinstance(text, str):
            if speaker in ROLES:
                return {"role": ROLES[speaker], "content": text}
            known = ", ".join(ROLES)
            raise ValueError(f"message {place} is from {speaker!r}; known speakers: {known}")
    found = str(message)[:60]
    raise ValueError(f"message {place} is {found}; a message is {SPELLINGS}")


def template_messages(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as chat templates take them, whether they are served or calibrate.

    Texts are one string each, arguments of calls are objects, a tool's answer has its name, and
    what is null is left out.
    """
    made: list[dict[str, Any]] = []
    names: dict[Any, Any] = {}
    for message in messages:
        fields = {key: value for key, value in message.items() if value is not None}
        if thought := fields.pop("reasoning", None):
            fields.setdefault("reasoning_content", thought)
        fields["content"] = _text_of(fields.get("content", ""))
        calls = fields.pop("tool_calls", ())
        if calls:  # templates ask whether there is such a field
            fields["tool_calls"] = [_read_call(call, names) for call in calls]
        if fields["role"] == "tool" and fields.get("tool_call_id") in names:
            fields.setdefault("name", names[fields["tool_call_id"]])
        made.append(fields)
    return made


def _text_of(content: Any) -> Any:
    """The text of a message: its parts, a line each, where all of them are text."""
    parts = content if isinstance(content, list) else [None]
    texts = [str(p["text"]) for p in parts if isinstance(p, Mapping) and p.get("text") is not None]
    return "\n".join(texts) if len(texts) == len(parts) else content


def _read_call(call: Any, names: dict[Any, Any]) -> Any:
    """A tool's call whose arguments are an object, or the text that they are; notes its name."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    names[call.get("id")] = function.get("name")
    if isinstance(given := function.get("arguments"), str):
        with suppress(ValueError, RecursionError):
            parsed = json.loads(given)
            function = {**function, "arguments": parsed if isinstance(parsed, dict) else given}
    return {**call, "function": function}


def has_chat_template(tokenizer: Any) -> bool:
    """Whether a transformers tokenizer can render chats."""
    return bool(getattr(tokenizer, "chat_template", None))


def brings_chat_template(folder: Path) -> bool:
    """Whether a model's folder holds a chat template, without loading its tokenizer.

    It is a file of its own, or is in the tokenizer's settings, as older models have it.
    """
    if (folder / "chat_template.jinja").is_file():
        return True
    with suppress(OSError, ValueError):  # no settings, or damaged ones: loading tells of that
        settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        return isinstance(settings, dict) and bool(settings.get("chat_template"))
    return False


def render_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any] | None = None,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    answer: bool = False,
) -> str:
    """The text of a chat by the tokenizer's template.

    Args:
        tokenizer: A transformers tokenizer that has a template.
        messages: The chat, as `read_messages` gives it.
        variables: Variables of the template, such as `enable_thinking`.
        tools: What the assistant may call, as OpenAI spells it; a template may pass them over.
        answer: Let the text end where the assistant's answer begins.

    Raises:
        ValueError: the template refuses the chat, such as for its roles, or is broken.
    """
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(
            list(messages),
            tools=list(tools) if tools else None,
            tokenize=False,
            add_generation_prompt=answer,
            **(variables or {}),
        )
    except (
        TemplateError,
        TypeError,
        ValueError,
        AttributeError,
        LookupError,
        ArithmeticError,
        RecursionError,
    ) as error:  # a template is a program: whatever it does wrong is its refusal
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ValueError(f"the chat template cannot render it ({reason})") from error


def template_variables(tokenizer: Any) -> frozenset[str]:
    """Names that a tokenizer's templates look up, which a chat may give values to."""
    from jinja2 import Environment
    from jinja2.meta import find_undeclared_variables

    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    template = tokenizer.chat_template
    texts = [template] if isinstance(template, str) else list(template.values())
    plain = [GENERATION.sub("", text) for text in texts]
    found = (find_undeclared_variables(environment.parse(text)) for text in plain)
    return frozenset().union(*found)


def check_chat_template(tokenizer: Any) -> None:
    """Check that a tokenizer's template can be read; one that cannot refuses every chat.

    Raises:
        ValueError: it is no Jinja; says in which line.
    """
    from jinja2 import TemplateSyntaxError

    try:
        render_chat(tokenizer, [{"role": "user", "content": "Hello"}])
    except ValueError as error:
        fault = error.__cause__
        if isinstance(fault, TemplateSyntaxError):
            raise ValueError(
                f"line {fault.lineno} of the chat template: {fault.message}"
            ) from error


MOST_LEADING = 4  # tokens that any tokenizer puts before a text


def text_tokens(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text, with the special tokens that the tokenizer adds.

    A text that begins with those itself, as one does that a chat template has rendered, does not
    get them a second time.
    """
    ids = list(tokenizer(text, verbose=False)["input_ids"])  # no word on its length
    if not ids or ids[0] not in ids[1 : MOST_LEADING + 1]:
        return ids
    lead = leading_tokens(tokenizer)
    return ids[len(lead) :] if lead and ids[: 2 * len(lead)] == 2 * lead else ids


def leading_tokens(tokenizer: Any) -> list[int]:
    """What the tokenizer puts before every text, such as a BOS token; many put nothing there."""
    ids = list(tokenizer("a")["input_ids"])
    plain = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    places = range(len(ids) - len(plain) + 1)
    return ids[: next((i for i in places if ids[i : i + len(plain)] == plain), 0)]
