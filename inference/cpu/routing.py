"""Which experts of a mixture each token goes to, and what they weigh, on a CPU.

Scores and weights are fp32 and a token's own: its bits do not depend on the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inference.models.config import Routing

TINY = 1e-20  # added to sums of scores, all of which may be next to nothing


def route(
    logits: Tensor, routing: Routing, correction: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The experts of each token and their weights.

    Args:
        logits: Float [T, E], of the router.
        routing: How they are chosen.
        correction: fp32 [E], added to scores where experts are chosen, or None.

    Returns:
        (weights fp32 [T, k], experts int64 [T, k]), the best first.
    """
    scores = torch.softmax(logits.float(), -1) if routing.scores == "softmax" else sigmoid(logits)
    ranked = scores if correction is None else scores + correction
    if routing.chosen_groups < routing.groups:
        ranked = _of_best_groups(ranked, routing)
    chosen = torch.topk(ranked, routing.chosen, dim=-1).indices
    weights = scores.gather(1, chosen)
    if routing.normalized:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + TINY)
    return weights * routing.factor, chosen


def sigmoid(logits: Tensor) -> Tensor:
    """fp32 of the same shape."""
    return 1.0 / (1.0 + torch.exp(-logits.float()))


def _of_best_groups(ranked: Tensor, routing: Routing) -> Tensor:
    """Ranks [T, E] of the experts of a token's best groups, -inf of all others."""
    grouped = ranked.unflatten(1, (routing.groups, -1))  # [T, G, E / G]
    own = grouped.topk(routing.best_of_group, dim=-1).values.sum(-1)
    best = own.topk(routing.chosen_groups, dim=-1).indices
    others = torch.ones_like(own, dtype=torch.bool).scatter(1, best, value=False)
    return grouped.masked_fill(others[..., None], -torch.inf).flatten(1)
