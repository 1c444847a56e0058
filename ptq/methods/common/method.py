"""What an algorithm that works on blocks is.

It is pure maths on tensors behind four calls, made block by block:

    prepare(work) -> observe(name, x) for every sample -> solve(work) -> commit(work)

`prepare` may look at the weights; `observe` sees the input of every linear layer for one sample at
a time and only accumulates; `solve` decides, with the statistics of the whole calibration set in
`work.statistics`; `commit` alone changes the block: it folds float weights into each other or hands
over quantized ones. Methods run one after the other, each on what the one before left.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from ptq.methods.common.block import BlockWork

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
            the samples run again.
        rescales: Whether it folds by factors alone, all of them told to `BlockWork.divide`: then
            maxima and moments after it follow from those before.
        clips: Whether it chooses ranges, whose cut values are to be counted.
        quantized_path: Whether it needs the samples as the quantized blocks before hand them over.
        keeps: What of its work a run keeps, so that `ptq solve` can do without the samples that it
            was searched with: `factors` that leave the block's function as it is and so hold for
            any scheme, or `ranges`, which hold for the scheme and the observers of the run.
    """

    needs: Literal["weights", "statistics", "samples"] = "samples"
    moments: MomentKind = "none"
    gradients = False
    folds = False
    rescales = False
    clips = False
    quantized_path = False
    keeps: Literal["nothing", "factors", "ranges"] = "nothing"

    def prepare(self, work: BlockWork) -> None:  # noqa: B027 (most methods need nothing here)
        """Look at a new block before its samples run."""

    def observe(self, name: str, x: Tensor) -> None:  # noqa: B027
        """Accumulate what one sample brings to linear layer `name`; `x` is [tokens, in] fp32."""

    @abstractmethod
    def solve(self, work: BlockWork) -> None:
        """Decide, changing nothing of the block."""

    def found(self) -> dict[str, Tensor]:
        """What `solve` has decided and `keeps` tells of; asked before `commit`."""
        return {}

    def recall(self, work: BlockWork, found: Mapping[str, Tensor]) -> None:
        """Take what `found` gave in an earlier run, in place of `solve`."""
        raise NotImplementedError(f"{type(self).__name__} keeps {self.keeps}")

    @abstractmethod
    def commit(self, work: BlockWork) -> None:
        """Change the block as decided."""
