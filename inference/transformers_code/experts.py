"""Experts inside transformers' code: each runs once, on the rows that its router chose for it."""

from __future__ import annotations

from torch import Tensor, nn

from inference.models.feed_forward import by_expert
from inference.transformers_code.attention import only_rows


class RoutedExperts(nn.ModuleList):
    """The experts of a block, in the place of transformers' stack.

    All that is added up of a token is added in the order of its own experts, so that its bits do
    not depend on the batch.
    """

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Sum of the chosen experts' outputs, as weighted.

        Args:
            x: [T, hidden].
            chosen: Experts of each token: int64 [T, k].
            weights: Theirs [T, k].
        """

        def run(expert: nn.Module, tokens: Tensor) -> Tensor:
            with only_rows(tokens):
                return expert(x[tokens])

        outputs = by_expert(x, chosen, list(self), run)
        y = outputs[:, 0] * weights[:, :1]
        for i in range(1, chosen.shape[1]):  # in order: a sum of torch's may take any
            y = y + outputs[:, i] * weights[:, i : i + 1]
        return y.to(x.dtype)
