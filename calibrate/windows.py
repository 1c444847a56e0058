"""From texts to token sequences, each of which begins as a prompt does that the model is served.

Text is one stream of documents, each closed by the end-of-text token, that is cut at full
sequences: before each of them stands what the tokenizer puts before a text (BOS, or nothing), and
nowhere else. Chats are not cut into: a sequence begins with a chat's beginning and is filled with
whole ones, the last of them cut at the sequence's end.

Plain text becomes chats for a model that is served through a chat template. Such a model meets the
template's own tokens in every prompt, and a scale that was chosen without them may not hold them.
Where there is nothing but text, its passages make chats: a user asks for what follows the first
part of one, and the assistant's answer is the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import cycle, islice
from typing import Any

import torch

from calibrate.spec import SplitSpec
from formats.chat_template import has_chat_template, leading_tokens, render_chat, text_tokens
from formats.chat_tokens import ChatEncoder

ASKED = ("Continue this text:", "What comes after this?", "Write on from here.")
PASSAGES = (300, 900, 1500)  # characters, in turn: templates' tokens stand at many positions
GIVEN = 3  # of a passage, the first of so many parts is the user's

Chat = list[dict[str, str]]


def as_chats(documents: Iterable[str]) -> Iterator[Chat]:
    """Chats of a user's and an assistant's message, of whatever the documents hold."""
    sizes, asked = cycle(PASSAGES), cycle(ASKED)
    for text in documents:
        start = 0
        while start < len(text):
            end = _cut(text, start, next(sizes))
            middle = _cut(text, start, (end - start) // GIVEN)
            given, answer = text[start:middle].strip(), text[middle:end].strip()
            if given and answer:
                yield [
                    {"role": "user", "content": f"{next(asked)}\n\n{given}"},
                    {"role": "assistant", "content": answer},
                ]
            start = end


def _cut(text: str, start: int, size: int) -> int:
    """Where a passage of about so many characters ends: at a line's end, a sentence's, a word's."""
    most = start + size
    if most >= len(text):
        return len(text)
    for mark in ("\n", ". ", " "):
        end = text.rfind(mark, start + size // 2, most)
        if end > start:
            return end + len(mark)
    return max(most, start + 1)


CHARACTERS_PER_TOKEN = 64  # read for each token asked for: far more than any tokenizer needs
FEWEST_CHARACTERS = 4 << 20  # a source up to here is tokenized whole
CHAT_CHARACTERS = 8  # of text for each token of chats that are made of it
LONGEST = 2 * max(PASSAGES)
LOOKED_AT, BEGINNING = 32, 400  # documents, and characters of each, that tell what a text is

Encode = Callable[[str, int | None], list[int]]  # text, most tokens -> ids


def cut_windows(
    documents: list[str],
    amount: SplitSpec,
    tokenizer: Any,
    *,
    templated: bool,
    spelled: Mapping[str, list[int]],
    chats: bool,
    pack: bool,
    shorter: bool,
) -> tuple[list[list[int]], int]:
    """Sequences of documents, chosen by the seed; and how many tokens or documents there are.

    Args:
        documents: Texts; blank ones give nothing.
        templated: Whether a template has written all special tokens of the documents.
        spelled: Token ids of documents that spell control tokens, which stay text there.
        pack: Fill sequences with documents; otherwise one document each.
        shorter: Let what is not enough for one sequence make one.
    """
    encode, length = _encoder(tokenizer, not templated, spelled), amount.sequence_length
    if not pack:
        encoded = (encode(documents[i], length) for i in _permutation(len(documents), amount))
        cut = list(islice((ids for ids in encoded if len(ids) > 1), amount.samples))
        return cut, len(cut)
    encoded = [ids for text in _enough(documents, amount) if (ids := encode(text, None))]
    end = None if chats else tokenizer.eos_token_id
    if end is not None:
        encoded = [ids if ids[-1] == end else [*ids, end] for ids in encoded]
    cut = list(_packed(encoded, length, leading_tokens(tokenizer), chats=chats))
    if encoded and not cut and shorter:
        whole = [token for ids in encoded for token in ids][:length]
        cut = [whole] if len(whole) > 1 else []
    order = _permutation(len(cut), amount)[: amount.samples]
    return [cut[i] for i in order], sum(map(len, encoded))


def windows_in_template(
    documents: Sequence[str], amount: SplitSpec, tokenizer: Any, *, pack: bool
) -> list[list[int]]:
    """Sequences of chats that are made of plain documents and rendered by the template.

    Documents are chosen by the seed; fewer sequences come of it where they are too short.

    Raises:
        ValueError: the template refuses chats of a user and an assistant.
    """
    length, encoder = amount.sequence_length, ChatEncoder(tokenizer)
    wanted = CHAT_CHARACTERS * length * amount.samples
    most = max(LONGEST, wanted // max(1, len(documents)))  # of each: from as many as there are
    parts = (_inside(documents[i], most) for i in _permutation(len(documents), amount))
    made = (encoder.tokens(chat)[: None if pack else length] for chat in as_chats(parts))
    encoded = filter(None, made)
    cut = _packed(encoded, length, leading_tokens(tokenizer), chats=True) if pack else encoded
    return list(islice(cut, amount.samples))


def _inside(text: str, most: int) -> str:
    """At most so many characters from a text's middle, from a line's beginning on."""
    start = max(0, (len(text) - most) // 2)
    start = text.find("\n", start, start + most // 2) + 1 or start
    return text[start : start + most] if len(text) > most else text


def are_rendered(documents: Sequence[str], tokenizer: Any) -> bool:
    """Whether texts are chats that the tokenizer's template has rendered already.

    They are where most of the first ones begin as its chats do.
    """
    opening = _opening(tokenizer)
    if not opening:
        return False
    first = islice(filter(str.strip, documents), LOOKED_AT)
    begin = [_without_lead(text_tokens(tokenizer, text[:BEGINNING]), tokenizer) for text in first]
    return 2 * sum(ids[: len(opening)] == opening for ids in begin) > len(begin)


def _opening(tokenizer: Any) -> list[int]:
    """What the template writes before a user's words: its first token where that is a special one.

    A system message that others have otherwise may follow it.
    """
    if not has_chat_template(tokenizer):
        return []
    try:
        both = [render_chat(tokenizer, [{"role": "user", "content": word}]) for word in "ab"]
    except ValueError:
        return []
    same = next((i for i, (one, other) in enumerate(zip(*both, strict=False)) if one != other), 0)
    text = both[0][:same]
    ids = _without_lead(tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer)
    return ids[:1] if ids and ids[0] in tokenizer.added_tokens_decoder else ids


def _without_lead(ids: list[int], tokenizer: Any) -> list[int]:
    lead = leading_tokens(tokenizer)
    return ids[len(lead) :] if ids[: len(lead)] == lead else ids


def _packed(
    encoded: Iterable[list[int]], length: int, lead: list[int], *, chats: bool
) -> Iterator[list[int]]:
    """Full sequences of documents, in their order; what is left at the end is dropped."""
    window: list[int] = []
    for ids in encoded:
        place = len(lead) if window and ids[: len(lead)] == lead else 0
        while place < len(ids):
            if not window and place:  # it begins within a document
                window = list(lead)
            taken = ids[place : place + length - len(window)]
            window, place = window + taken, place + len(taken)
            if len(window) < length:
                break
            yield window
            window = []
            if chats:
                break


def _encoder(tokenizer: Any, adds: bool, spelled: Mapping[str, list[int]]) -> Encode:
    """Text to its token ids, with the tokenizer's special ones where it `adds` them.

    There are none where there is no more than special tokens.
    """
    special = set(tokenizer.all_special_ids)

    def encode(text: str, most: int | None) -> list[int]:
        part = text[: CHARACTERS_PER_TOKEN * most] if most else text
        if text in spelled:
            ids = spelled[text][:most]
        elif adds:
            ids = text_tokens(tokenizer, part)[:most]
        else:  # no word on its length
            ids = tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"][:most]
        return [] if special.issuperset(ids) else ids

    return encode


def _enough(documents: list[str], amount: SplitSpec) -> list[str]:
    """All documents, or of a large source as many, chosen by the seed, as can be needed."""
    wanted = CHARACTERS_PER_TOKEN * amount.samples * amount.sequence_length
    most = max(FEWEST_CHARACTERS, wanted)
    if sum(map(len, documents)) <= most:
        return documents
    chosen, held = [], 0
    for i in _permutation(len(documents), amount):
        chosen.append(i)
        held += len(documents[i])
        if held >= most:
            break
    return [documents[i][:most] for i in sorted(chosen)]


def _permutation(count: int, amount: SplitSpec) -> list[int]:
    generator = torch.Generator().manual_seed(amount.seed)
    return torch.randperm(count, generator=generator).tolist()
