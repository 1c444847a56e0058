"""Peers of a case: each is checked, then timed in turns with ours; or the reason why it is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from kernels.bench.peers.torch_layers import (
    UnavailableError,
)
from kernels.bench.peers.torch_peers import Peer, peers_for
from kernels.bench.shapes import Shape
from kernels.bench.timing import CLOCKS, Call

TOLERANCE = 1e-2  # of the norm: results in bf16, sums in an order of their own


@dataclass
class Peers:
    """Makes the peers of shapes.

    Attributes:
        device: Where.
        reasons: Why a peer gives no time, with the number of shapes that it was asked for.
        sample: What gives the microseconds of call(i), i cycling over so many sets of arguments; by
            default the device's clock's.
    """

    device: torch.device
    reasons: dict[tuple[str, str], int] = field(default_factory=dict)
    sample: Callable[[Call, int], Callable[[], float]] | None = None

    def of(self, shape: Shape) -> dict[str, Callable[[], float]]:
        """What gives the microseconds of those that can, by name."""
        found = {}
        for peer in peers_for(shape, self.device):
            made = self._make(peer, shape)
            if isinstance(made, str):
                reason = peer.name, made
                self.reasons[reason] = self.reasons.get(reason, 0) + 1
            else:
                found[peer.name] = made
        return found

    def messages(self) -> list[str]:
        """Why peers are missing, a line for each reason."""
        return [f"{peer}: {reason} ({n} rows)" for (peer, reason), n in self.reasons.items()]

    def _make(self, peer: Peer, shape: Shape) -> Callable[[], float] | str:
        try:
            calls = peer.build(shape, self.device)
            error = calls.error(calls.call(0))
            if not error < TOLERANCE:
                return f"its result is off by {error:.1e}"
            return (self.sample or CLOCKS[self.device.type].sample)(calls.call, calls.copies)
        except UnavailableError as missing:
            return str(missing)
        except (RuntimeError, ValueError, NotImplementedError) as refused:
            return f"torch refuses: {' '.join(str(refused).split())[:160]}"
