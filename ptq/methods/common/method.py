"""What an algorithm that works on blocks is.

It is pure maths on tensors in four calls, made block by block:

    prepare(work) -> observe(name, x, i) for every sample -> solve(work) -> commit(work)

`prepare` may look at the weights; `observe` sees the input of every linear layer for one sample at
a time, samples in any order and several at once where there are several devices, and only keeps
what each of them shows; `solve` decides, with the statistics of the whole calibration set in
`work.seen`; `commit` alone changes the block: it folds float weights into each other or hands over
quantized ones. Methods run one after the other, each on what the one before left.

Parts of a block (`Part`) are solved side by side on several devices.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Self

from formats.families.block_layers import SmoothingGroup
from ptq.methods.common.block import BlockWork

if TYPE_CHECKING:
    from torch import Tensor

    from ptq.methods.common.block import QuantizedLinear
    from ptq.methods.common.spec import MethodSpec
    from ptq.methods.common.with_feedback import Feedback


MomentKind = Literal["none", "diagonal", "full"]


class Method(ABC):
    """Base of the methods; see the module's docstring for what each call may do.

    Attributes:
        needs: What it solves from: `weights` alone, `statistics` (with `moments`), or `samples`
            that run through the block.
        moments: Which second moments of inputs it uses.
        gradients: Whether it uses `BlockWork.fisher`: the driver then runs the model backward
            before it solves the first block.
        folds: Whether `commit` changes the block's float weights, so that methods after it must see
            the samples run again. What the block computes should stay: layers are compared with it
            as it is then, and an event tells where it does not.
        rescales: Whether it folds by factors alone, all of them given to `BlockWork.divide`: then
            maxima and moments after it follow from those before.
        clips: Whether it chooses ranges, whose cut values are to be counted.
        quantized_path: Whether it needs the samples as the quantized blocks before hand them over.
        keeps: What of its work a run keeps, so that `ptq solve` can do without the samples that it
            was searched with: `factors` that leave the block's function as it is and so hold for
            any scheme, or `ranges`, which hold for the scheme and the observers of the run.
        brief: Of many equal steps, how many `solve` takes where only its time matters; all if None.
        unspent: Seconds that the steps left out would take.
    """

    needs: Literal["weights", "statistics", "samples"] = "samples"
    moments: MomentKind = "none"
    gradients = False
    folds = False
    rescales = False
    clips = False
    quantized_path = False
    keeps: Literal["nothing", "factors", "ranges"] = "nothing"
    brief: int | None = None
    unspent = 0.0

    def prepare(self, work: BlockWork) -> None:  # noqa: B027 (most methods need nothing here)
        """Look at a new block before its samples run."""

    def observe(self, name: str, x: Tensor, sample: int) -> None:  # noqa: B027
        """Keep what one sample brings to a linear layer.

        Called by several threads at once, for different samples.

        Args:
            name: Full name of the layer.
            x: Its input, fp32 [tokens, in], on any of the run's devices.
            sample: Index of the sample.
        """

    @abstractmethod
    def solve(self, work: BlockWork) -> None:
        """Decide, changing nothing of the block."""

    def feedback(self, work: BlockWork) -> Iterator[tuple[str, Feedback]]:
        """What rounding the targets is expected to cost in any scheme, by full name.

        None of those that only solving tells of.
        """
        yield from ()

    def found(self) -> dict[str, Tensor]:
        """What `solve` has decided and `keeps` tells of; asked before `commit`."""
        return {}

    def recall(self, work: BlockWork, found: Mapping[str, Tensor]) -> None:
        """Take what `found` gave in an earlier run, in place of `solve`."""
        raise NotImplementedError(f"{type(self).__name__} keeps {self.keeps}")

    def parts(self, work: BlockWork, most: int) -> list[Part]:
        """What can be solved side by side, on several devices; nothing is solved on the first one.

        Each part is solved by a copy of the method (`part`), which has seen all samples; the method
        itself then takes what they found (`gather`).

        Args:
            most: Parts in which what can be divided anywhere is divided; more, where there are.
        """
        return []

    def part(self, work: BlockWork) -> Self:
        """A copy that solves a part of the block, after what all samples showed.

        Args:
            work: With some of the block's targets, or some of its groups; on any device.
        """
        return copy.copy(self)

    def gather(self, work: BlockWork, parts: Sequence[Self]) -> None:
        """Take what its parts have solved, in their order, in place of `solve`."""
        raise NotImplementedError(f"{type(self).__name__} has no parts")

    @abstractmethod
    def commit(self, work: BlockWork) -> None:
        """Change the block as decided."""


class LayerMethod(Method):
    """Base of the methods that give each target layer by itself its quantized weight.

    Attributes:
        spec: What the recipe says of it.
        solved: The layers, by full name, from `solve` to `commit`.
    """

    def __init__(self, spec: MethodSpec) -> None:
        self.spec = spec
        self.solved: dict[str, QuantizedLinear] = {}

    def parts(self, work: BlockWork, most: int) -> list[Part]:
        """The layers of each input; see `layer_parts`."""
        return layer_parts(work, most)

    def gather(self, work: BlockWork, parts: Sequence[Self]) -> None:
        """Put the layers together, on the block's device."""
        solved = {name: layer for part in parts for name, layer in part.solved.items()}
        self.solved = {name: solved[name].to(work.block.device) for name in work.targets}

    def commit(self, work: BlockWork) -> None:
        """Hand the solved layers over, in the model's order."""
        work.quantized.update({name: self.solved[name] for name in work.targets})
        self.solved = {}


@dataclass(frozen=True)
class Part:
    """Some of a block's layers, or some of its smoothing groups.

    Attributes:
        title: What a person calls it.
        cost: How long it takes, in any unit.
        targets: Full names of the layers; None for all.
        groups: The groups; None for all.
    """

    title: str
    cost: float
    targets: tuple[str, ...] | None = None
    groups: tuple[SmoothingGroup, ...] | None = None


def layers_by_input(work: BlockWork) -> dict[str, dict[str, list[str]]]:
    """A block's targets by what they read (`BlockWork.observed_for`) and by their module."""
    stand_in, found = work.observed_for, dict[str, dict[str, list[str]]]()
    for name in work.targets:
        modules = found.setdefault(stand_in[name], {})
        modules.setdefault(name.rpartition(".")[0], []).append(name)
    return found


def layer_parts(work: BlockWork, most: int) -> list[Part]:
    """Layers that are solved without each other; those of one module and input stay together.

    Args:
        most: Parts into which the layers that read one input, as experts do, are divided: what
            follows from that input is found once for each.
    """
    parts = []
    for modules in layers_by_input(work).values():
        each = list(modules.values())
        size = -(-len(each) // most)
        for start in range(0, len(each), size):
            names = [name for module in each[start : start + size] for name in module]
            cost = sum(_cost(work, name) for name in names)
            parts.append(Part(first_names(names), cost, targets=tuple(names)))
    return parts


def _cost(work: BlockWork, name: str) -> float:
    """Of solving a layer [N, K]: every column moves those after it, in all rows."""
    rows, columns = work.block.linears[name].weight.shape
    return float(columns) * columns * (rows + columns / 3)


def first_names(names: Sequence[str]) -> str:
    """Three of some layers, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}"
