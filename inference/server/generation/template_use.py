"""Which fields of a chat its template leaves out: they are refused, as no model would see them.

A chat is rendered a second time with marks in the place of what is in question; what has no mark in
the result is taken out for a third time, and where that changes nothing, it is not used. Only what
may not be lost is looked at: not what an assistant thought, which templates leave out of earlier
turns on purpose, nor what it said beside its calls, which some formats have no place for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from formats.errors import RequestError, suggestion

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
            told = suggestion(name, sorted(known - OF_THE_SERVER)) if known - OF_THE_SERVER else ""
            raise RequestError(
                f"{field}: the model's chat template has no such variable, so that it would change "
                f"nothing; leave it out{told and '. ' + told}",
                "chat_template_kwargs",
            )


def check_used(
    render: Callable[[Chat], str], messages: Sequence[Mapping[str, Any]], text: str
) -> None:
    """Check that a template writes what messages hold.

    Args:
        render: Gives the text of a chat; raises ValueError where the template refuses it.
        messages: The chat, as templates take it.
        text: Of it.

    Raises:
        RequestError: it leaves a field out, which is named.
    """
    chat = [dict(message) for message in messages]
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
