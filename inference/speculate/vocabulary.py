"""Whether two models mean the same by a token."""

from __future__ import annotations

from typing import Any

from formats.errors import EngineError


def require_same_vocabulary(
    name: str, draft: Any, draft_size: int, target: Any, target_size: int
) -> int:
    """Refuse a draft model of another vocabulary.

    Ids behind those of the tokenizer's tokens pad the embeddings of models; they may be as many or
    as few as they like.

    Args:
        name: The draft model.
        draft: Its tokenizer.
        draft_size: Its logits.
        target: The tokenizer of the model that it is to draft for.
        target_size: The model's logits.

    Returns:
        Ids below are known to both.

    Raises:
        EngineError: a token of one is not one of the other, or the smaller model lacks it.
    """
    own, other = draft.get_vocab(), target.get_vocab()
    shared, told = min(draft_size, target_size), f"{draft_size} and {target_size} logits"
    remedy = "Take a draft model of the same family, or one that was distilled from the model"
    differing = own.items() ^ other.items()
    if differing:
        token = min(number for _, number in differing)
        texts = (_text(vocabulary, token) for vocabulary in (own, other))
        raise EngineError(
            f"speculate: the draft model {name} has another vocabulary than the model ({told}): "
            "token {} is {} to it and {} to the model. {}".format(token, *texts, remedy)
        )
    if draft_size != target_size and max(own.values()) >= shared:
        raise EngineError(
            f"speculate: the draft model {name} has another vocabulary than the model: {told}, and "
            f"their tokenizer has tokens up to {max(own.values())}. {remedy}"
        )
    return shared


def _text(vocabulary: dict[str, int], token: int) -> str:
    """The token of an id, quoted; "none"."""
    return next((repr(text) for text, number in vocabulary.items() if number == token), "none")
