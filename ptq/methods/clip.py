"""Clipping of static inputs, searched against the block's output.

An observer chooses the range of an input by what it sees of the input alone. What matters is the
output: for each distinct input of a block, factors of the observer's range are tried, and the one
is kept with the least squared error of the block's output, with the weights that read the input
rounded and everything else in float. The idea is the clipping search of Wei et al., "Outlier
Suppression: Pushing the Limit of Low-bit Transformer Language Models", NeurIPS 2022 (arXiv
2209.13325), section 4.2, on a grid.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field

from calibrate.spec import SINK_INPUT
from formats.namespace import later
from formats.scheme import LayerScheme, Scheme
from ptq.methods.common.block import BlockWork, exact_sum, loss_against, replaced
from ptq.methods.common.method import Method, Part, layer_parts
from ptq.methods.common.spec import MethodSpec, Stage

if TYPE_CHECKING:
    from torch import Tensor
with later():
    import torch

    from ptq.methods.common import rounding


class ClipSpec(MethodSpec):
    """Clipping of static inputs, searched against the block's output.

    YAML::

        clip:
          factors: [0.95, 0.9, 0.8, 0.7, 0.6, 0.5]  # of the observer's range, tried beside 1
          search_samples: 4       # calibration sequences that it measures its error on
    """

    stage: ClassVar = Stage.CLIP
    name: Literal["clip"] = "clip"
    factors: Annotated[
        tuple[Annotated[float, Field(gt=0.0, lt=1.0, allow_inf_nan=False)], ...],
        Field(min_length=1),
    ] = (0.95, 0.9, 0.8, 0.7, 0.6, 0.5)
    """Shares of the observer's range that are tried in addition to the whole; one pass of the block
    each.
    """
    search_samples: Annotated[int, Field(ge=1)] = 4
    """Calibration sequences that the search measures its error on; time and memory grow in
    proportion.
    """

    def misfit(self, scheme: Scheme, layers: Sequence[LayerScheme]) -> str | None:
        """It needs a layer with a static input."""
        if any(layer.static_input for layer in layers):
            return None
        return (
            f"clip chooses ranges of static inputs; the scheme {scheme.wac} has none: leave it out"
        )

    def algorithm(self) -> Clip:
        """Chooses the ranges of a block's inputs."""
        return Clip(self)


class Clip(Method):
    """Searches the range of every static input of a block; see the module's docstring."""

    clips = True
    keeps = "ranges"

    def __init__(self, spec: ClipSpec) -> None:
        self.spec = spec
        self.solved: dict[str, float] = {}

    def solve(self, work: BlockWork) -> None:
        """Choose a factor for each distinct input, those before it as they were chosen."""
        block = work.block.begins(self.spec.search_samples)
        outputs = (block.run(index) for index in range(len(block.inputs)))
        losses = [loss_against(y, work.block.sinks) for y in outputs]
        rounded = {n: layer.dequantized() for n, layer in rounding.round_to_nearest(work).items()}
        together: dict[str, list[str]] = {}
        for name in work.targets:
            if not work.scheme_of(name).static_input:
                continue  # an input that is scaled when it arrives has no range to choose
            together.setdefault(work.observed_for[name], []).append(name)
        self.solved = {}

        def error(names: Sequence[str], factor: float) -> float:
            """Squared error of the block's outputs, summed exactly over its inputs."""
            with _clipped(work, names, rounded, factor):
                return exact_sum(loss(block.run(i)) for i, loss in enumerate(losses))

        for names in together.values():
            errors = {factor: error(names, factor) for factor in (1.0, *self.spec.factors)}
            best = min(errors, key=lambda factor: errors[factor])
            self.solved |= dict.fromkeys(names, best)

    def found(self) -> dict[str, Tensor]:
        """The factor of each layer's range, fp64, by the layer's full name."""
        return {
            name: torch.tensor(factor, dtype=torch.float64) for name, factor in self.solved.items()
        }

    def recall(self, work: BlockWork, found: Mapping[str, Tensor]) -> None:
        """Take the factors."""
        self.solved = {name: factor.item() for name, factor in found.items()}

    def parts(self, work: BlockWork, most: int) -> list[Part]:
        """The layers of each input: all of them, as one range is chosen for all."""
        return layer_parts(work, 1)

    def gather(self, work: BlockWork, parts: Sequence[Self]) -> None:
        """Put the factors together."""
        self.solved = {name: factor for part in parts for name, factor in part.solved.items()}

    def commit(self, work: BlockWork) -> None:
        """Set the ranges."""
        work.clips.update(self.solved)


@contextmanager
def _clipped(
    work: BlockWork, names: Sequence[str], rounded: dict[str, Tensor], factor: float
) -> Iterator[None]:
    """Let the layers that read one input see it with its range times `factor`, for a while."""
    scale = work.input_scale(names[0])
    assert scale is not None
    sinks = work.input_scale(names[0], SINK_INPUT)
    sinks = scale if sinks is None else sinks  # which are never clipped
    with ExitStack() as stack:
        for name in names:

            def seen(x: Tensor, name: str = name) -> Tensor:
                return work.seen_input(name, x, scale * factor, sinks)

            stack.enter_context(replaced(work.block.linears[name], rounded[name], seen))
        yield
