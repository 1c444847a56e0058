"""Requests that wait after each token for a client of the engine to choose the next."""

from __future__ import annotations

from typing import NamedTuple

from formats.errors import RequestError
from inference.scheduling.blocks import blocks_for
from kernels.attention_inputs import KV_BLOCK


class Held(NamedTuple):
    """A request that is held.

    Attributes:
        name: Its name.
        max_tokens: Most tokens that it may have behind its prompt: what was asked for, or what
            `max_model_len` leaves.
    """

    name: str
    max_tokens: int


def check_beams(beams: int, prompt: int, room: int, places: int, blocks: int) -> None:
    """Check that requests that are forked from one prompt can run together.

    Args:
        beams: How many they are; they share the whole blocks of the prompt.
        prompt: Its tokens.
        room: Most tokens of each behind it.
        places: Of the batch.
        blocks: Of the cache.

    Raises:
        RequestError: they cannot, even if nothing else runs.
    """
    if beams > places:
        raise RequestError(
            f"beam_width: {beams} beams need as many places, but max_batch_size is {places}; ask "
            "for fewer beams, or raise it",
            "beam_width",
        )
    shared = prompt // KV_BLOCK
    needed = shared + beams * (blocks_for(prompt + room) - shared)
    if needed > blocks:
        raise RequestError(
            f"beam_width: {beams} beams of {room} tokens behind a prompt of {prompt} may need "
            f"{needed} blocks of {KV_BLOCK} tokens, but the cache has {blocks}; lower beam_width "
            "or max_tokens, or raise kv_blocks",
            "beam_width",
        )
