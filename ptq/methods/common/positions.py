"""What keys and queries are at all positions of a context, from windows that show the first ones.

Rotary embedding turns pair i of channels by the angle p f_i at position p. Pairs of low frequency
hardly move within a window of 512 tokens, and are somewhere else at position 4,096: the mean of K
over such windows is no mean there, and what queries leave unread here they read there. An int4
cache that subtracts that mean and rounds by those moments of Q lost SmolLM2 135M .016 nats from 64
to 511, .047 to 4,095 and .126 from there on; by the ones below .020, .022 and .031. Gemma 3 270M
lost .015, .021, .027 and .033 up to 511, 1,023, 2,047 and 4,095; now .016, .020, .018 and .018.

A query's product with a key depends on how far apart they stand, so a window that begins at
position o has the same K and Q, turned by R(o). Means over offsets follow without running one:

    E[R(o) k] = mean_o R(o) E[k],    E[R(o) q q^T R(o)^T] = mean_o R(o) E[q q^T] R(o)^T

Offsets are spaced evenly in log(64 + o), up to the longest context: most requests are short, and
long ones are not forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from formats.errors import CheckpointError
from formats.namespace import later

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig

    from formats.families.family import Family
with later():
    import torch

    from formats.modeling import rotary

NEAR = 64  # positions; offsets are about as dense up to here as at 0
OFFSETS = 4096  # of which means are taken


@dataclass(frozen=True, eq=False)
class Positions:
    """The offsets of windows in a context, for the heads of one layer.

    Attributes:
        cos: Mean over the offsets of the cosine of each channel's angle, fp64 [D]; 1 where none
            turns.
        sin: The same of sines; 0 where none turns.
        cos_cos: Sums over the offsets of products of two channels' cosines, fp64 [D, D].
        sin_cos: Of a channel's sine, by rows, and another one's cosine.
        sin_sin: Of two channels' sines.
        turn: A quarter turn of all pairs, fp64 [D, D]: R(o) k = cos k + sin (turn k).
    """

    cos: Tensor
    sin: Tensor
    cos_cos: Tensor
    sin_cos: Tensor
    sin_sin: Tensor
    turn: Tensor

    @classmethod
    def of_layer(
        cls, family: Family, config: PretrainedConfig, layer: int, pairs: Sequence[int]
    ) -> Positions | None:
        """Those of a layer of a declared family.

        Args:
            pairs: Of `formats.families.sizes.turning_pairs`.

        Returns:
            None where nothing turns, or by angles that the family does not know, or no limit of a
            context is known.
        """
        try:
            own, text = rotary.read_rotary(family, config)[layer], config.get_text_config()
        except CheckpointError:
            return None
        longest = own.original_positions or getattr(text, "max_position_embeddings", None) or 0
        if not len(own.frequency) or longest <= NEAR:
            return None
        share = (torch.arange(OFFSETS, dtype=torch.float64) + 0.5) / OFFSETS
        offsets = (NEAR * ((longest / NEAR) ** share - 1)).round()
        number, size = torch.tensor(pairs), len(pairs)
        turning = torch.bincount(number)[number] == 2
        frequency = torch.zeros(size, dtype=torch.float64)
        frequency[turning] = own.frequency.double()[number[turning]]
        angle = offsets[:, None] * frequency
        cos, sin = angle.cos(), angle.sin()
        partner = (number[:, None] == number) & ~torch.eye(size, dtype=torch.bool)
        turn = partner.double().tril() - partner.double().triu()
        return cls(cos.mean(0), sin.mean(0), cos.T @ cos, sin.T @ cos, sin.T @ sin, turn)

    def mean(self, x: Tensor) -> Tensor:
        """That of keys whose mean within windows is x, fp64 [heads, D]."""
        return self.cos * x + self.sin * (x @ self.turn.T)

    def moments(self, x: Tensor) -> Tensor:
        """Those of queries whose second moments within windows are x, fp64 [heads, D, D]."""
        turned = self.turn @ x
        mixed = self.sin_cos * turned
        found = self.cos_cos * x + mixed + mixed.mT
        return (found + self.sin_sin * (turned @ self.turn.T)) / OFFSETS

    def reach(self, x: Tensor) -> Tensor:
        """A bound of keys whose largest magnitudes within windows are x, [heads, D]."""
        return torch.hypot(x, x @ self.turn.abs().to(x))
