"""Inputs that no static scale serves get one for each token, where that is measured to pay.

One scale for all tokens must hold the largest of them. Where tokens differ much in an input, as at
down_proj in some blocks of most models, ordinary tokens are left few steps, and neither smoothing
nor clipping helps. A scale for each token costs one more look at the row when the model runs, and on
several ranks an exchange. So it is taken for the inputs alone whose static rounding costs too much:
with L the squared error of the block's output,

    L(input rounded with its static scale) - L(input rounded token by token) > excess L(weights)

where L(weights) is what rounding the block's weights to nearest costs: an input that is the smaller
part of what is lost anyway stays static.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from formats.families.groups import SmoothingGroup
from formats.later import later
from formats.scheme import ActivationSpec, LayerScheme, Scheme
from ptq.methods.common.block import BlockWork, replaced
from ptq.methods.common.events import Event
from ptq.methods.common.method import Method
from ptq.methods.common.spec import MethodSpec, Stage

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    import kernels.numerics as numerics
    from ptq.methods.common import rounding
else:
    torch = later("torch")
    numerics = later("kernels.numerics")
    rounding = later("ptq.methods.common.rounding")

DYNAMIC = ActivationSpec(granularity="per_token")


class PerTokenSpec(MethodSpec):
    """Scales by token for those static int8 inputs that need them, by the block's error.

    YAML::

        per_token:
          excess: 0.5        # of what rounding the block's weights costs, that an input may cost
          search_samples: 4  # calibration sequences that errors are measured on
    """

    stage: ClassVar = Stage.CLIP
    name: Literal["per_token"] = "per_token"
    excess: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 0.5
    """What a static scale may cost more than scales by token, as a share of what rounding the
    block's weights costs; 0 scales every input by token that gains by it.
    """
    search_samples: Annotated[int, Field(ge=1)] = 4
    """Calibration sequences that errors are measured on; time and memory grow in proportion."""

    def misfit(self, scheme: Scheme, layers: Sequence[LayerScheme]) -> str | None:
        """It needs a layer with a static int8 input."""
        if any(_may_change(layer) for layer in layers):
            return None
        return (
            f"per_token chooses among static int8 inputs; the scheme {scheme.wac} has none: leave "
            "it out"
        )

    def algorithm(self) -> PerToken:
        """Chooses the inputs of a block."""
        return PerToken(self)

    def explain(
        self, layer: str, scheme: LayerScheme, groups: Sequence[SmoothingGroup]
    ) -> Iterator[str]:
        """Whether the layer's input may change."""
        if _may_change(scheme):
            yield "per_token: its input is scaled by token if a static scale costs too much"


def _may_change(scheme: LayerScheme) -> bool:
    return scheme.static_input and scheme.activations == ActivationSpec()


class PerToken(Method):
    """Chooses which static inputs of a block are scaled by token; see the module's docstring."""

    keeps = "ranges"

    def __init__(self, spec: PerTokenSpec) -> None:
        self.spec = spec
        self.solved: dict[str, float] = {}

    def solve(self, work: BlockWork) -> None:
        """Measure each distinct input alone, all else in float."""
        reference = [work.block.run(i) for i in work.samples(self.spec.search_samples)]
        together: dict[str, list[str]] = {}
        for name in work.targets:
            if _may_change(work.scheme_of(name)):
                together.setdefault(work.observed_for[name], []).append(name)
        self.solved = {}
        if not together or not reference:
            return
        rounded = {n: layer.dequantized() for n, layer in rounding.round_to_nearest(work).items()}
        allowed = self.spec.excess * _loss(work, rounded, lambda _, x: x, reference)
        for names in together.values():
            weights = {name: work.block.linears[name].weight for name in names}
            static = _loss(work, weights, _static(work), reference)
            if static > allowed:
                gained = static - _loss(work, weights, _by_token, reference)
                if gained > allowed:
                    self.solved |= dict.fromkeys(names, gained)

    def found(self) -> dict[str, Tensor]:
        """What each layer gains, fp64, by its full name."""
        return {n: torch.tensor(gain, dtype=torch.float64) for n, gain in self.solved.items()}

    def recall(self, work: BlockWork, found: Mapping[str, Tensor]) -> None:
        """Take the layers."""
        self.solved = {name: gain.item() for name, gain in found.items()}

    def commit(self, work: BlockWork) -> None:
        """Give the layers their scheme, and say so."""
        for name in self.solved:
            own = work.scheme_of(name).model_copy(update={"activations": DYNAMIC})
            work.schemes = {**work.schemes, name: own}
            message = "its input is scaled by token: one static scale would cost too much"
            work.events.append(Event(module=name, kind="scaled_by_token", message=message))
        self.solved = {}


Seen = Callable[[str, "Tensor"], "Tensor"]


def _static(work: BlockWork) -> Seen:
    def seen(name: str, x: Tensor) -> Tensor:
        return work.seen_row_by_row(name, x, work.input_scale(name), work.sink_scale(name))

    return seen


def _by_token(name: str, x: Tensor) -> Tensor:
    return numerics.fake_quantize_activations(x, None, numerics.INT8, -1)


def _loss(
    work: BlockWork, weights: Mapping[str, Tensor], seen: Seen, reference: Sequence[Tensor]
) -> float:
    """`BlockWork.loss` with some layers' weights replaced and their inputs as they are seen."""
    with ExitStack() as stack:
        for name, weight in weights.items():

            def own(x: Tensor, name: str = name) -> Tensor:
                return seen(name, x)

            stack.enter_context(replaced(work.block.linears[name], weight, own))
        return math.fsum(work.loss(work.block.run(i), y) for i, y in enumerate(reference))
