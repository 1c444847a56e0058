"""Text that a model writes itself: what its drafts will be compared with."""

from __future__ import annotations

import torch
from torch import Tensor

from formats.checkpoint.read import Checkpoint
from inference.config import EngineConfig
from inference.engine import Engine
from inference.requests.request import SamplingParams

BEGINNING = 8  # the model is given a sequence's first eighth
AT_ONCE = 256  # sequences
WARM = 0.8  # temperature of every other sequence; the others are greedy


def continued_by_model(checkpoint: Checkpoint, ids: Tensor, device: str) -> Tensor:
    """Sequences of a text with the model's words behind the first eighth of each.

    Every other one is greedy, the others are drawn at a temperature of 0.8, by seeds of their own.

    Args:
        checkpoint: The model.
        ids: int64 [sequences, length].
        device: Where it runs.

    Returns:
        Of the same shape.
    """
    count, length = ids.shape
    given = max(1, length // BEGINNING)
    sizes = EngineConfig(max_batch_size=AT_ONCE, max_model_len=length)
    engine = Engine.from_pretrained(checkpoint.path, config=sizes, device=device)
    room = length - given
    params = [
        SamplingParams(max_tokens=room, ignore_eos=True, temperature=WARM * (i % 2), seed=i)
        for i in range(count)
    ]
    outputs = engine.generate([row[:given].tolist() for row in ids], params)
    return torch.tensor([[*output.prompt_token_ids, *output.token_ids] for output in outputs])
