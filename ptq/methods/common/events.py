"""What methods tell a person of their work on a block: rows of the record of a run."""

from __future__ import annotations

from typing import Literal

from formats.scheme import Strict

EventKind = Literal[
    "smoothing_skipped",
    "fallback",
    "worse_than_baseline",
    "clipping",
    "damping_raised",
    "expert_starved",
    "outlier_token",
    "scaled_by_token",
    "left_out",
    "changed_function",
]


class Event(Strict):
    """Something that a person should know of one module.

    Kinds: `smoothing_skipped` (a group could not be folded), `fallback` (a method did worse than
    doing nothing and was not applied), `worse_than_baseline` (a module's output is noisier than
    with round-to-nearest alone), `clipping` (an observer cut off many values), `damping_raised` (a
    Hessian needed more damping than asked for), `expert_starved` (a router hardly ever chose an
    expert for the calibration tokens), `outlier_token` (tokens after the sink tokens have inputs
    far larger than others'), `scaled_by_token` (a static input that is scaled by token instead),
    `left_out` (a layer that predicts further tokens, which the checkpoint does not have),
    `changed_function` (a method changed what a float block computes).
    """

    module: str
    kind: EventKind
    message: str


class Candidate(Strict):
    """One smoothing strength that was tried; `alpha` None is no smoothing.

    `error` is the squared error of the block's output divided by the sum of its squares.
    """

    alpha: float | None
    error: float


class SmoothingRow(Strict):
    """What was chosen for one smoothing group; `alpha` None means that it was left alone.

    `scale_min` and `scale_max` bound the factors that the source was divided by. Where pieces of
    the channels have strengths of their own, these are `pieces`, the largest channels' first, and
    `alpha` is the highest of them. `error` is None and there are no candidates where nothing was
    tried.
    """

    method: str
    source: str
    consumers: tuple[str, ...]
    alpha: float | None
    error: float | None
    scale_min: float
    scale_max: float
    candidates: tuple[Candidate, ...]
    pieces: tuple[float | None, ...] = ()

    @property
    def strength(self) -> str:
        """The strength or strengths, for a person."""
        parts = (
            "none" if alpha is None else f"{alpha:g}" for alpha in self.pieces or (self.alpha,)
        )
        return " / ".join(parts)

    @property
    def fallback(self) -> Event | None:
        """The event of a group that no strength was better for than to leave it alone."""
        if self.alpha is not None:
            return None
        tried = ", ".join(f"{row.alpha:g}" for row in self.candidates if row.alpha is not None)
        message = f"not smoothed: the block's output is no better with alpha {tried}"
        return Event(module=self.source, kind="fallback", message=message)

    @property
    def unsmoothed_error(self) -> float | None:
        """Error of the block's output with this group quantized but not smoothed."""
        return next((row.error for row in self.candidates if row.alpha is None), None)
