"""AWQ: scales up the channels of a weight that large activations meet, before it is rounded.

Lin et al., "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration", MLSys
2024 (arXiv 2306.00978). A column that is multiplied by s > 1 while its input is divided by s is
rounded to finer steps as long as it does not set its group's largest magnitude. The factors are

    s = s_X^alpha,    s_X = mean|X_j|,    alpha in 0, 1/n, ..., 1                       (Eq. 4, 5)

divided by sqrt(max s min s), for every group of `ptq.methods.common.migration`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import reduce
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from formats.families.block_layers import SMOOTHING_KINDS, SmoothingKind
from formats.namespace import later
from ptq.methods.common.block import BlockWork
from ptq.methods.common.folding import SmoothedGroup
from ptq.methods.common.migration import Migration
from ptq.methods.common.spec import (
    BlockSizes,
    MethodSpec,
    PlannedLayer,
    Stage,
    smoothing_lines,
    smoothing_memory,
)

if TYPE_CHECKING:
    from torch import Tensor
with later():
    import torch


class AWQSpec(MethodSpec):
    """AWQ: scales up channels with large activations before weights are rounded.

    YAML::

        awq:
          steps: 20               # exponents 0, 1/20, ... that the search tries
          search_samples: 8       # calibration sequences that it measures its error on
          targets: [attention_input, attention_output, mlp_input, mlp_output]

    The targets are those of SmoothQuant. AWQ's clipping is the scale search `output_mse` of the
    method that rounds.
    """

    stage: ClassVar = Stage.SMOOTH
    name: Literal["awq"] = "awq"
    steps: Annotated[int, Field(ge=1, le=100)] = 20
    """The search tries exponents 0, 1/steps, ..., 1; its time grows in proportion."""
    search_samples: Annotated[int, Field(ge=1)] = 8
    """Calibration sequences that the search measures its error on; time and memory grow in
    proportion.
    """
    targets: Annotated[tuple[SmoothingKind, ...], Field(min_length=1)] = SMOOTHING_KINDS
    """Inputs that are scaled, as of `smoothquant`."""

    @property
    def smooths(self) -> tuple[SmoothingKind, ...]:
        """Kinds of groups that it scales: its targets."""
        return self.targets

    def algorithm(self) -> AWQ:
        """Scales the groups of a block."""
        return AWQ(self)

    def explain(self, layer: PlannedLayer) -> Iterator[str]:
        """Which factors the layer takes or gives."""
        return smoothing_lines(self.name, layer, self.targets)

    def memory(self, block: BlockSizes) -> int:
        """Outputs of the searched samples, and one group's weights once more."""
        return smoothing_memory(self.targets, self.search_samples, block)


def activation_scale(x_mean: Tensor, alpha: float) -> Tensor:
    """Equation 4 with the normalization above, for mean|X_j| [channels]: fp64."""
    scale = x_mean.double().pow(alpha).clamp(min=1e-4)
    return scale / (scale.max() * scale.min()).sqrt()


class AWQ(Migration):
    """Scales every group of a block that can be folded; see the module's docstring."""

    def __init__(self, spec: AWQSpec) -> None:
        super().__init__()
        self.spec, self.name = spec, spec.name
        self.targets, self.search_samples = spec.targets, spec.search_samples
        self._seen: dict[str, dict[int, tuple[Tensor, int]]] = {}  # sum, tokens: by layer, sample

    def prepare(self, work: BlockWork) -> None:
        """Keep the groups that can be folded; nothing is seen of their inputs yet."""
        super().prepare(work)
        self._seen = {group.consumers[0]: {} for group in self.groups}

    def observe(self, name: str, x: Tensor, sample: int) -> None:
        """Sum the magnitudes of a sample's channels."""
        if name in self._seen:
            self._seen[name][sample] = x.double().abs().sum(dim=0).cpu(), len(x)

    def candidates(self, group: SmoothedGroup) -> Mapping[float, Tensor]:
        """Equation 4 for each exponent but 0, which changes nothing."""
        name = group.group.consumers[0]
        own = self._seen[name]
        sums, tokens = zip(*(own[sample] for sample in sorted(own)), strict=True)  # in one order
        mean = reduce(torch.add, sums) / sum(tokens)
        mean = group.mean_by_channel(mean / group.work.seen.divisors.get((name, "input"), 1.0))
        mean = torch.where(mean > 0, mean, mean.max())  # a dead channel needs no help
        steps = self.spec.steps
        return {i / steps: activation_scale(mean, i / steps) for i in range(1, steps + 1)}
