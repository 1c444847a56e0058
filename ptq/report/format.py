"""How the report writes its figures."""

from __future__ import annotations

from inference.accuracy import Interval
from inference.bench.figures import Percentiles, Spread


def size_text(nbytes: float) -> str:
    """Bytes for a person."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return (
                f"{nbytes / size:.3g} {unit}" if nbytes < 1e12 else f"{nbytes / size:,.0f} {unit}"
            )
    return f"{nbytes:.0f} B"


def percent(share: float, digits: int = 2) -> str:
    """A share as per cent."""
    return f"{100 * share:.{digits}f}%" if share else "0%"


def decibel(ratio: float | None) -> str:
    """dB, or a dash where nothing was lost or measured."""
    return "–" if ratio is None else f"{ratio:.1f}"


def scale_text(low: float, high: float) -> str:
    """One scale, or the range of several."""
    return f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"


def interval_text(ends: Interval | None, digits: int = 4, form: str = "f") -> str:
    """An interval, or that there was too little to tell one."""
    if ends is None:
        return "needs 2 sequences"
    return f"{ends[0]:.{digits}{form}} to {ends[1]:.{digits}{form}}"


def spread_text(spread: Spread) -> str:
    """Median with the least and the greatest."""
    return f"{spread.median:,.0f} ({spread.low:,.0f} to {spread.high:,.0f})"


def percentiles_text(ms: Percentiles) -> str:
    """Three percentiles."""
    return f"{ms.p50:.1f} / {ms.p90:.1f} / {ms.p99:.1f}"
