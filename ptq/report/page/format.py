"""How the report writes its figures."""

from __future__ import annotations

from inference.accuracy import Interval
from inference.bench.figures import Percentiles, Spread


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
