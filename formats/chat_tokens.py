"""From a chat to token ids, where the text of messages stays text.

A template writes control tokens such as `<|im_end|>` around messages. Where a message holds such a
text itself, a tokenizer makes a control token of both: whoever writes a message could end it, and
begin another in the name of another role. So here

1. texts of messages and of tools are searched for control tokens, in any spelling that folds to one
   (full-width characters, upper case). Mostly there are none, and the chat is rendered and
   tokenized as it is;
2. otherwise each letter of what was found is replaced by a private-use character before the
   template sees it, so that all control tokens of the rendered chat are the template's;
3. these get names that no text has, the letters come back, and a tokenizer that knows the control
   tokens by those names alone encodes the whole: what a message holds is spelled as any text is.

Control tokens are those that the tokenizer calls special, and added tokens that the template writes
around the messages of a plain chat; in what a tool gave, also those that it writes around that.
"""

from __future__ import annotations

import json
import re
import secrets
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from typing import Any

from formats.chat_template import render_chat

Messages = Sequence[Mapping[str, Any]]
Span = tuple[int, int]
PRIVATE = range(0xE000, 0xF900)
ESCAPED = re.compile(r"\\u([ef][0-9a-f]{3})", re.IGNORECASE)  # as `tojson` may write one of them
FOLDED = (range(0x10000), range(0x1D400, 0x1D800), range(0x1F100, 0x1F200))
CALL = {"id": "000000000", "type": "function", "function": {"name": "f", "arguments": {"x": "y"}}}
ASKED = {"role": "user", "content": "0"}
PLAIN = (ASKED, {"role": "assistant", "content": "1"}, ASKED)
CALLED = (
    ASKED,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "1", "name": "f", "tool_call_id": CALL["id"]},
)


class ChatEncoder:
    """Token ids of chats by a tokenizer's template.

    Args:
        tokenizer: A transformers tokenizer that has a template.
        special_tokens_in_content: Let texts of messages hold control tokens.
    """

    def __init__(self, tokenizer: Any, *, special_tokens_in_content: bool = False) -> None:
        self._tokenizer, self._free = tokenizer, special_tokens_in_content

    def tokens(
        self,
        messages: Messages,
        variables: Mapping[str, Any] | None = None,
        *,
        tools: Messages | None = None,
        answer: bool = False,
        check: Callable[[str], None] = lambda text: None,
    ) -> list[int]:
        """Token ids of a chat.

        Args:
            messages: The chat, as `read_messages` gives it.
            variables: Of the template; they are not searched for control tokens.
            tools: What the assistant may call.
            answer: Let the chat end where the assistant's answer begins.
            check: Is given the rendered text before it is tokenized, and may refuse it.

        Raises:
            ValueError: the template refuses the chat, or control tokens cannot be distinguished
                from text.
        """
        messages, tools, letters = self._hidden(messages, tools)
        text = render_chat(self._tokenizer, messages, variables, tools=tools, answer=answer)
        check(text)
        return self.encode(text, letters)

    def texts(self, chats: Sequence[Messages]) -> tuple[list[str], Mapping[str, str]]:
        """Chats as texts, and the letters that private-use characters of these stand for.

        `encode` takes these texts, whole, joined or cut. ValueError: as of `tokens`.
        """
        messages, _, letters = self._hidden([one for chat in chats for one in chat], None)
        left = iter(messages)
        parts = ([next(left) for _ in chat] for chat in chats)
        return [render_chat(self._tokenizer, part) for part in parts], letters

    def encode(self, text: str, letters: Mapping[str, str]) -> list[int]:
        """Token ids of a rendered text and of the letters that were replaced in it."""
        return self._encode_hidden(text, letters) if letters else self._encode(text)["input_ids"]

    def holds_controls(self, messages: Messages) -> bool:
        """Whether texts of messages hold control tokens, so that what is rendered cannot tell."""
        return self._hide(messages, None) is not None

    def _encode(self, text: str, **options: Any) -> Any:
        return self._tokenizer(text, add_special_tokens=False, verbose=False, **options)

    def _hidden(
        self, messages: Messages, tools: Messages | None
    ) -> tuple[Messages, Messages | None, Mapping[str, str]]:
        """As `_hide`; what holds no control tokens as it is."""
        hidden = None if self._free else self._hide(messages, tools)
        if hidden and not self._tokenizer.is_fast:
            raise ValueError("it holds control tokens, which this tokenizer cannot tell from text")
        return hidden or (messages, tools, {})

    def _hide(
        self, messages: Messages, tools: Messages | None
    ) -> tuple[Messages, Messages | None, dict[str, str]] | None:
        """Messages and tools without control tokens, and which letter a character stands for."""
        bodies = [{k: v for k, v in message.items() if k != "role"} for message in messages]
        values = [*bodies, *(tools or ())]
        try:
            texts = [list(_texts(value)) for value in values]
        except RecursionError as error:
            raise ValueError("it is nested too deeply") from error
        whole = "".join(text for each in texts for text in each)
        spans, start = self._controls.find(whole), 0
        for message, each in zip(messages, texts, strict=False):
            end = start + sum(map(len, each))
            if message["role"] == "tool":
                spans += [(start + a, start + b) for a, b in self._wider.find(whole[start:end])]
            start = end
        if not spans:
            return None
        letters = self._letters(whole, spans)
        pieces = _pieces(_replace(whole, spans, letters), (t for each in texts for t in each))
        made = [_rebuilt(value, pieces) for value in values]
        hidden = [{**m, **body} for m, body in zip(messages, made, strict=False)]
        return hidden, made[len(messages) :] or None, {c: own for own, c in letters.items()}

    def _letters(self, text: str, spans: Iterable[Span]) -> dict[str, str]:
        """A private-use character, which the text does not have, for each one in the spans."""
        own = sorted({char for start, end in spans for char in text[start:end]})
        used = {*text, *str(self._tokenizer.chat_template)}
        used |= {chr(int(code, 16)) for code in ESCAPED.findall(text)}
        free = [chr(code) for code in PRIVATE if chr(code) not in used]
        if len(free) < len(own):
            raise ValueError("it holds control tokens, and nearly all private-use characters")
        return dict(zip(own, free, strict=False))

    def _encode_hidden(self, text: str, letters: Mapping[str, str]) -> list[int]:
        """Token ids of a rendered chat whose private-use characters stand for letters of texts."""
        found = self._encode(text, return_offsets_mapping=True)
        ids, places = found["input_ids"], found["offset_mapping"]
        tokens, begin, start = [], 0, 0
        for i in [*(i for i, token in enumerate(ids) if token in self._own), len(ids)]:
            stop, after = places[i] if i < len(ids) else (len(text), len(text))
            run, spelled = text[start:stop], ids[begin:i]
            restored = _restored(run, letters)
            if restored != run:
                alone = self._encode(run)["input_ids"] == spelled
                spelled = self._encode(restored, split_special_tokens=True)["input_ids"]
                if not alone or not self._own.isdisjoint(spelled):
                    return self._encode_by_names(text, ids, places, letters)
            tokens += [*spelled, *ids[i : i + 1]]
            begin, start = i + 1, after
        return tokens

    def _encode_by_names(
        self, text: str, ids: Sequence[int], places: Sequence[Span], letters: Mapping[str, str]
    ) -> list[int]:
        """The same, where what stands around a part changes its tokens, or it spells a control."""
        names, encoder, numbers = self._by_name
        parts, end = [], 0
        for token, (start, stop) in zip(ids, places, strict=True):
            if token in self._own:
                parts += [_restored(text[end:start], letters), names[token]]
                end = stop
        parts.append(_restored(text[end:], letters))
        made: list[int] = encoder.encode("".join(parts), add_special_tokens=False).ids
        return [numbers.get(token, token) for token in made]

    @cached_property
    def _added(self) -> dict[int, Any]:
        known = self._tokenizer.added_tokens_decoder
        return {token: added for token, added in known.items() if added.content.strip()}

    @cached_property
    def _controls(self) -> _Finder:
        written, added = self._written(PLAIN), self._added.items()
        return _Finder({t: a.content for t, a in added if a.special or t in written})

    @cached_property
    def _wider(self) -> _Finder:
        return _Finder({t: a.content for t, a in self._added.items() if t in self._written(CALLED)})

    @cached_property
    def _own(self) -> frozenset[int]:
        """Control tokens; one that stands for unknown characters comes of any text."""
        return frozenset(self._controls.texts | self._wider.texts) - {self._tokenizer.unk_token_id}

    def _written(self, chat: Messages) -> frozenset[int]:
        """Added tokens that the template writes in a chat; none where it refuses that."""
        try:
            text = render_chat(self._tokenizer, chat)
        except ValueError:
            return frozenset()
        return frozenset(self._encode(text)["input_ids"]) & self._added.keys()

    @cached_property
    def _by_name(self) -> tuple[dict[int, str], Any, dict[int, int]]:
        """Names of the control tokens, a tokenizer that knows them by these, its ids as ours."""
        from tokenizers import Tokenizer

        backend = self._tokenizer.backend_tokenizer
        texts = self._controls.texts | self._wider.texts
        secret = secrets.token_hex(8)  # no text holds it, as nobody knows it
        names = {token: f"\U000f0000{secret}{token}\U000f0001" for token in texts}
        data = json.loads(backend.to_str())
        _rename(data, {texts[token]: name for token, name in names.items()})
        made = Tokenizer.from_str(json.dumps(data))
        numbers: dict[int, int] = {}
        for token, added in self._tokenizer.added_tokens_decoder.items():
            number = made.token_to_id(names.get(token) or str(added.content))
            if number is not None:
                numbers[number] = token
        return names, made, numbers


class _Finder:
    """Finds control tokens in texts, in any spelling that folds to theirs."""

    def __init__(self, texts: Mapping[int, str]) -> None:
        self.texts, begun = dict(texts), {}
        for text in texts.values():
            node: dict[str, Any] = begun
            for char in text.translate(_folds()):
                node = node.setdefault(char, {})
            node[""] = {}
        self._pattern = re.compile(_pattern(begun) or r"(?!)")

    def find(self, text: str) -> list[Span]:
        """Where they are, from the left, of those that begin together the longest."""
        return [found.span() for found in self._pattern.finditer(text.translate(_folds()))]


def _pattern(begun: Mapping[str, Any]) -> str:
    """A pattern for all texts of a trie, in time that does not depend on how many there are."""
    options = [re.escape(char) + _pattern(node) for char, node in begun.items() if char]
    joined = f"(?:{'|'.join(options)})" if len(options) > 1 or "" in begun else "".join(options)
    return f"{joined}?" if options and "" in begun else "".join(options and [joined])


@cache
def _folds() -> dict[int, str]:
    """Characters as a template or a tokenizer may come to write them: compatible, in lower case."""
    made = dict.fromkeys(range(0xD800, 0xE000), "?")  # halves of pairs, refused where they matter
    made[ord("\u2581")] = " "  # SentencePiece's space
    for code in (code for codes in FOLDED for code in codes):
        plain = unicodedata.normalize("NFKC", chr(code)).casefold()
        if plain != chr(code) and len(plain) == 1:
            made.setdefault(code, plain)
    return made


def _texts(value: Any) -> Iterator[str]:
    """All texts inside what JSON gives, keys included, in one order."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield key
            yield from _texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)


def _rebuilt(value: Any, texts: Iterator[str]) -> Any:
    """The same value with other texts, in the order of `_texts`."""
    if isinstance(value, str):
        return next(texts)
    if isinstance(value, Mapping):
        return {next(texts): _rebuilt(inner, texts) for inner in value.values()}
    return [_rebuilt(inner, texts) for inner in value] if isinstance(value, list) else value


def _pieces(text: str, like: Iterable[str]) -> Iterator[str]:
    """A text cut into pieces as long as those."""
    start = 0
    for piece in like:
        yield text[start : start + len(piece)]
        start += len(piece)


def _replace(text: str, spans: Iterable[Span], letters: Mapping[str, str]) -> str:
    """A text with other letters in some places."""
    parts, end = [], 0
    for start, stop in sorted(spans):
        start = max(start, end)
        parts += [text[end:start], *(letters[char] for char in text[start:stop])]
        end = max(end, stop)
    return "".join([*parts, text[end:]])


def _restored(text: str, letters: Mapping[str, str]) -> str:
    """A text with its own letters again, also where a template escaped those in their place."""

    def letter(escape: re.Match[str]) -> str:
        return letters.get(chr(int(escape[1], 16)), escape[0])

    return ESCAPED.sub(letter, text).translate({ord(char): own for char, own in letters.items()})


def _rename(data: dict[str, Any], names: Mapping[str, str]) -> None:
    """Give tokens of a tokenizer, as its JSON tells of it, other names, and no other way to be."""
    for added in data["added_tokens"]:
        added["content"] = names.get(added["content"], added["content"])
    data["post_processor"] = data["truncation"] = data["padding"] = None
    model = data["model"]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if isinstance(model["vocab"], list):
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
    else:
        model["vocab"] = {names.get(piece, piece): i for piece, i in model["vocab"].items()}
    if "merges" in model:
        pairs = [m.split(" ") if isinstance(m, str) else m for m in model["merges"]]
        model["merges"] = [pair for pair in pairs if not {*pair, "".join(pair)} & names.keys()]
