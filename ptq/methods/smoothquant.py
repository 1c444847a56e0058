"""SmoothQuant: moves the outliers of activations into weights, where int8 can hold them.

Xiao et al., "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language
Models", ICML 2023 (arXiv 2211.10438), with factors (Eq. 4)

    s_j = max|X_j|^alpha / max|W_j|^(1 - alpha)

for every group of `ptq.methods.common.migration`. alpha is fixed or searched for each group. Static
input scales are those of absmax, which for a smoothed input is known without running it:
max_j max|X_j| / s_j.

One alpha for all channels of a group is a compromise between the few that stand out and the many
that do not. With `pieces`, the channels are clustered by their largest magnitude into k quantiles,
and each gets an alpha of its own: coordinate descent from the best common one, piece by piece from
the largest magnitudes down, on the same measure of error. The idea is that of PaddleSlim's
PieceWiseSearch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from formats.families.block_layers import SMOOTHING_KINDS, SmoothingKind
from formats.namespace import later
from formats.scheme import ActivationSpec, LayerScheme, Scheme
from ptq.methods.common.folding import SmoothedGroup, Trials
from ptq.methods.common.migration import Choice, Migration
from ptq.methods.common.spec import (
    Alpha,
    BlockSizes,
    MethodSpec,
    PlannedLayer,
    Stage,
    fixed_alpha,
    smoothing_lines,
    smoothing_memory,
)

if TYPE_CHECKING:
    from torch import Tensor
with later():
    import torch


class SmoothQuantSpec(MethodSpec):
    """SmoothQuant: outliers move from the inputs of linear layers into their weights.

    YAML::

        smoothquant:
          alpha: search           # or one number from 0 to 1 for all groups
          alphas: [0.5, 0.7, 0.85, 0.95, 1.0] # what a search tries, beside leaving the group alone
          pieces: 1               # of a group's channels, by magnitude, searched one by one
          search_samples: 4       # calibration sequences that a search measures its error on
          targets: [attention_input, attention_output, mlp_input, mlp_output]
          by_token: 1.25          # or null: every static input stays static

    The targets are the layers whose input is smoothed: `attention_input` q, k and v (through the
    norm before them), `attention_output` o (through v), `mlp_input` gate and up (through the norm
    before them), `mlp_output` down (through up). Where a scheme quantizes the cache alone,
    `attention_output` evens out the channels of V and may be the only target. Of a mixture of
    experts, `mlp_input` takes powers of two, which leave the routing as it is, and all experts of a
    block get one alpha.
    """

    stage: ClassVar = Stage.SMOOTH
    fits_cache_alone: ClassVar[bool] = True
    name: Literal["smoothquant"] = "smoothquant"
    alpha: Literal["search"] | Alpha = "search"
    """Strength from 0 (evens out the weights alone) to 1 (the inputs alone) for all
    groups, or `search` for each.
    """
    alphas: Annotated[tuple[Alpha, ...], Field(min_length=1)] = (0.5, 0.7, 0.85, 0.95, 1.0)
    """Strengths that a search tries, in addition to no smoothing; time grows in proportion."""
    pieces: Annotated[int, Field(ge=1, le=16)] = 1
    """Parts of a group's channels, by magnitude, that get a strength of their own; needs `alpha:
    search`.
    """
    search_samples: Annotated[int, Field(ge=1)] = 4
    """Calibration sequences that the search measures its error on; time and memory grow in
    proportion.
    """
    targets: Annotated[tuple[SmoothingKind, ...], Field(min_length=1)] = SMOOTHING_KINDS
    """Inputs that are smoothed."""
    by_token: Annotated[float, Field(ge=1.0, allow_inf_nan=False)] | None = None
    """Limit of a static int8 input's error, as a multiple of its error with per-token scales;
    beyond it the input is scaled per token. Null keeps all inputs static. Needs `alpha: search`.
    """

    @model_validator(mode="after")
    def _pieces_are_searched(self) -> SmoothQuantSpec:
        if self.pieces > 1 and self.alpha != "search":
            raise ValueError(
                f"found pieces: {self.pieces} with alpha: {self.alpha:g}; only a search gives "
                "pieces strengths of their own: set alpha: search, or remove pieces"
            )
        return self

    @property
    def smooths(self) -> tuple[SmoothingKind, ...]:
        """Kinds of groups that it smooths: its targets."""
        return self.targets

    def misfit(self, scheme: Scheme, layers: Sequence[LayerScheme]) -> str | None:
        """Without quantized weights it serves the cached V alone."""
        if scheme.weights is not None or self.targets == ("attention_output",):
            return None
        return (
            f"found smoothquant with targets {', '.join(self.targets)}, but the scheme "
            f"{scheme.wac} leaves weights and activations in floating point; set targets: "
            "[attention_output], and V alone is smoothed"
        )

    def algorithm(self) -> SmoothQuant:
        """Smooths the groups of a block."""
        return SmoothQuant(self)

    @property
    def static_inputs_note(self) -> str | None:
        """Scales by token, where `by_token` is set."""
        if self.by_token is None:
            return None
        return f"inputs go by token where a static scale costs {self.by_token:g} times their error"

    def explain(self, layer: PlannedLayer) -> Iterator[str]:
        """Which factors the layer takes or gives."""
        yield from smoothing_lines(self.name, layer, self.targets)
        smoothed = any(layer.name in g.consumers and g.kind in self.targets for g in layer.groups)
        if smoothed and self.static_inputs_note and layer.scheme.activations == ActivationSpec():
            yield f"{self.name}: {self.static_inputs_note}"

    def memory(self, block: BlockSizes) -> int:
        """Outputs of the searched samples, and one group's weights once more."""
        samples = self.search_samples if self.alpha == "search" else 0
        return smoothing_memory(self.targets, samples, block)

    def without_samples(self, strengths: Sequence[float]) -> tuple[str, str] | None:
        """One alpha for all groups: the middle of those that were found."""
        return fixed_alpha(strengths)


def smoothing_scale(x_absmax: Tensor, w_absmax: Tensor, alpha: float) -> Tensor:
    """Equation 4, in fp64.

    Args:
        x_absmax: max|X_j| of each channel [channels].
        w_absmax: max|W_j| of the consumers' columns [channels].
        alpha: Migration strength; 1 moves all of the difficulty into the weights.

    Returns:
        s [channels] fp64; 1 where a channel is dead on either side, as nothing is to be balanced.
    """
    x, w = x_absmax.double(), w_absmax.double()
    scale = x.pow(alpha) / w.pow(1.0 - alpha)
    return torch.where((x > 0) & (w > 0), scale, torch.ones_like(scale))


def pieces_of(magnitude: Tensor, count: int) -> Tensor:
    """Which piece each channel belongs to: int64 [channels], 0 for the largest magnitudes.

    Pieces have equal numbers of channels, up to one.
    """
    rank = torch.empty(len(magnitude), dtype=torch.int64)
    rank[magnitude.argsort(descending=True, stable=True)] = torch.arange(len(magnitude))
    return rank * count // len(magnitude)


def search_pieces(
    piece: Tensor,
    scales: Mapping[float | None, Tensor],
    start: Choice,
    error: Callable[[Tensor], float],
) -> Choice:
    """Strengths of the pieces, found one after the other; never worse than what they start from.

    Args:
        piece: From `pieces_of`.
        scales: Factors [channels] of each strength; None is no smoothing.
        start: One strength for all pieces.
        error: Error with factors [channels].
    """
    count = int(piece.max().item()) + 1
    assert start.error is not None
    best, least = Choice(start.alphas * count, start.scale, start.error), start.error
    for index in range(count):
        for alpha, scale in scales.items():
            if alpha == start.alphas[0]:  # known
                continue
            alphas = (*best.alphas[:index], alpha, *best.alphas[index + 1 :])
            trial = torch.where(piece == index, scale, best.scale)
            found = error(trial)
            if found < least:
                best, least = Choice(alphas, trial, found), found
    return best


class SmoothQuant(Migration):
    """Smooths every group of a block that can be folded; see the module's docstring."""

    def __init__(self, spec: SmoothQuantSpec) -> None:
        super().__init__()
        self.spec, self.name = spec, spec.name
        self.targets, self.search_samples = spec.targets, spec.search_samples
        self.by_token = spec.by_token
        self.needs = "samples" if spec.alpha == "search" else "statistics"

    @property
    def alphas(self) -> tuple[float, ...]:
        """The strengths to try."""
        return self.spec.alphas if self.spec.alpha == "search" else (self.spec.alpha,)

    def refined(
        self, choice: Choice, trials: Trials, scales: Mapping[float | None, Tensor]
    ) -> Choice:
        """Search the strengths of pieces, where the recipe asks for more than one."""
        if self.spec.pieces == 1:
            return choice
        (group,) = trials.groups
        piece = pieces_of(group.x_absmax, self.spec.pieces)

        def error(scale: Tensor) -> float:
            return trials.error([group.fold(group.protected(scale))])

        return search_pieces(piece, scales, choice, error)

    def candidates(self, group: SmoothedGroup) -> Mapping[float, Tensor]:
        """Equation 4 for each strength."""
        x, w = group.x_absmax, group.w_absmax
        return {alpha: smoothing_scale(x, w, alpha) for alpha in self.alphas}
