"""Times of peers: each is checked, then measured, once in a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch

from kernels.bench.shapes import Gemm, Shape
from kernels.bench.timing import timed
from kernels.bench.torch_peers import Peer, UnavailableError, peers_for

TOLERANCE = 1e-2  # of the norm: results in bf16, sums in an order of their own


@dataclass
class Peers:
    """Measures the peers of shapes, each once in a run.

    Attributes:
        device: Where.
        time: Microseconds of call(i), i cycling over so many sets of arguments.
        reasons: Why a peer gave no time, with the number of shapes that it was asked for.
    """

    device: torch.device
    time: Callable[[Callable[[int], object], int], float] = timed
    reasons: dict[tuple[str, str], int] = field(default_factory=dict)
    _found: dict[tuple[str, Shape], float | str] = field(default_factory=dict)

    def of(self, shape: Shape | None) -> dict[str, float]:
        """Microseconds of those that can, by name."""
        return dict(self._measured(shape))

    def _measured(self, shape: Shape | None) -> Iterator[tuple[str, float]]:
        for peer in peers_for(shape):
            assert shape is not None
            key = peer.name, _essence(peer, shape)
            if key not in self._found:
                self._found[key] = self._measure(peer, shape)
            found = self._found[key]
            if isinstance(found, str):
                reason = peer.name, found
                self.reasons[reason] = self.reasons.get(reason, 0) + 1
            else:
                yield peer.name, found

    def _measure(self, peer: Peer, shape: Shape) -> float | str:
        """Microseconds, or why there are none."""
        try:
            calls = peer.build(shape, self.device)
            error = calls.error(calls.call(0))
            if not error < TOLERANCE:
                return f"its result is off by {error:.1e}"
            return self.time(calls.call, calls.copies)
        except UnavailableError as missing:
            return str(missing)
        except (RuntimeError, ValueError, NotImplementedError) as refused:
            return f"torch refuses: {' '.join(str(refused).split())[:160]}"


def _essence(peer: Peer, shape: Shape) -> Shape:
    """What a peer's time depends on."""
    if not isinstance(shape, Gemm):
        return shape
    return replace(shape, family="", group=shape.group if peer.by_group else 0)
