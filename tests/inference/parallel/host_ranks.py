"""Ranks on one GPU, or on CPUs in place of GPUs: their collectives go through the host, so that
nothing of a step can be captured."""

from typing import Any, cast

import torch

from inference.parallel.gpu import GpuLoader, NcclGroup
from kernels.triton import fused


class HostGroup:
    """In place of `inference.parallel.gpu.NcclGroup` and its `AllReduce`."""

    def __init__(self, host, dtype):
        self.rank, self.ranks, self.progress = host.rank, host.ranks, host.progress
        self._host, self._dtype = host, dtype
        self.reducer = self

    def sum(self, x, scaling=None):
        wide = x.cpu() if scaling is not None else x.cpu().float()
        total = self._host.sum(wide).to(x.device)
        return total.to(self._dtype) if scaling is None else scaling.of(total, self._dtype)

    def add_rms_norm(self, x, *rest, scaling=None, **named):
        return fused.add_rms_norm(self.sum(x, scaling), *rest, **named)

    def largest(self, part):
        return self._host.largest(part.cpu()).to(part.device)

    def smallest(self, number):
        return self._host.smallest(number)

    def side_by_side(self, part, sizes):
        return self._host.side_by_side(part.cpu(), sizes).to(part.device)

    def on_first(self, part, sizes):
        return self._host.on_first(part.cpu(), sizes).to(part.device)

    def share(self, chosen):
        """The first rank's tensor: of the others nothing but zeros is added."""
        own = chosen.cpu() if self.rank == 0 else torch.zeros(chosen.shape, dtype=chosen.dtype)
        return self._host.sum(own).to(chosen.device)

    def check(self):
        """Gloo itself raises where a rank is gone."""

    def give_up(self):
        """No kernel waits."""


class HostLoader(GpuLoader):
    """`GpuLoader` whose ranks meet through the host."""

    def join(self) -> NcclGroup:
        return cast(Any, HostGroup(self.host, self.inner.dtype))


def host_loader(inner) -> type[HostLoader]:
    """Of any rank."""
    return HostLoader
