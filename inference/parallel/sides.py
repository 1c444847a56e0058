"""Chooses what ranks do in their own way on a kind of device; see `loader.DeviceSide`."""

from __future__ import annotations

from typing import Any

from inference.backend import Backend
from inference.cpu.backend import CpuBackend
from inference.parallel.cpu import CpuSide
from inference.parallel.loader import DeviceSide


def side_of(inner: Backend[Any, Any]) -> DeviceSide:
    """What depends on the kind of a backend's device."""
    if isinstance(inner, CpuBackend):
        return CpuSide()
    from inference.parallel.gpu import GpuSide  # needs Triton

    return GpuSide()
