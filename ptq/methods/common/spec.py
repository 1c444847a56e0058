"""What a recipe says of a method, and what the rest of the project may ask of it.

A specification is data without torch. In YAML a method is its name, or a mapping of its name to its
options:

    methods:
      - smoothquant: {alpha: search, search_samples: 4}
      - rtn

A method is a file of `ptq.methods` with a subclass of `MethodSpec`; `ptq.methods.registry` finds
it. Whoever plans, explains or drives a run asks these questions and knows no method by its name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from statistics import median_high
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from formats.families.block_layers import SmoothingGroup, SmoothingKind
from formats.scheme import LayerScheme, Scheme, Strict
from ptq.methods.common.method import Method, MomentKind

if TYPE_CHECKING:
    from formats.families.family import Family
    from ptq.methods.common.float_model import FloatModel

Alpha = Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)]
ScaleSearch = Literal["absmax", "mse", "weighted_mse", "output_mse"]
# which second moments of inputs a search of scales needs
MOMENTS: dict[ScaleSearch, MomentKind] = {
    "absmax": "none",
    "mse": "none",
    "weighted_mse": "diagonal",
    "output_mse": "full",
}
FLOAT = 4  # bytes of an fp32 element


class Stage(IntEnum):
    """Where in a recipe's list a method stands: each leaves alone what those before it have made.

    Methods of one stage may follow each other in any order, but only one may round.
    """

    ROTATE = 1
    SHIFT = 2
    SMOOTH = 3
    SMOOTH_CACHE = 4
    CLIP = 5
    COUNT = 6
    ROUND = 7
    REFINE = 8


@dataclass(frozen=True)
class BlockSizes:
    """Sizes of the largest decoder block, from which follows what a method holds at once.

    Attributes:
        quantized: Weights of the layers that are quantized: (out, in) each.
        hidden: Width of the residual stream.
        tokens: Of a calibration sample.
        sample_bytes: What one sample needs on its way through the block.
        consumers: Elements of the weights that read a smoothing group, or groups that get one
            strength together: the most of each kind.
    """

    quantized: Sequence[tuple[int, int]]
    hidden: int
    tokens: int
    sample_bytes: int
    consumers: Mapping[SmoothingKind, int]

    @property
    def elements(self) -> int:
        """Of all weights that are quantized."""
        return sum(rows * columns for rows, columns in self.quantized)

    @property
    def largest(self) -> int:
        """Elements of the largest weight that is quantized."""
        return max((rows * columns for rows, columns in self.quantized), default=0)

    @property
    def widest(self) -> int:
        """Elements of the widest input of a layer that is quantized."""
        return max((columns for _, columns in self.quantized), default=0)


@dataclass(frozen=True)
class PlannedLayer:
    """A linear layer that a plan quantizes, and all of the plan's smoothing groups."""

    name: str
    scheme: LayerScheme
    groups: Sequence[SmoothingGroup] = ()


class MethodSpec(Strict):
    """Base of the specifications; a subclass adds its `name`, a literal, and its options.

    Attributes:
        stage: Its place in a recipe's list.
        fits_cache_alone: Whether it is of use where nothing but the cache is quantized.
        makes_super_blocks: Whether weights that it rounds may be those of Q4_K.
        needs_declaration: Whether it must know what each layer is, as a declared family tells.
        unmovable: Why adapters of the original model cannot follow what it does; None where they
            can, by the factors that it gives `BlockWork.divide`.
    """

    name: str
    stage: ClassVar[Stage]
    fits_cache_alone: ClassVar[bool] = False
    makes_super_blocks: ClassVar[bool] = False
    needs_declaration: ClassVar[bool] = False
    unmovable: ClassVar[str | None] = None

    @property
    def static_inputs_note(self) -> str | None:
        """For `ptq check`: what becomes of static inputs that cost too much; None: they stay."""
        return None

    @property
    def smooths(self) -> tuple[SmoothingKind, ...]:
        """Kinds of smoothing groups whose factors it chooses."""
        return ()

    def misfit(self, scheme: Scheme, layers: Sequence[LayerScheme]) -> str | None:
        """Why it has nothing to do in a recipe, with the way out; None where it has.

        Args:
            layers: What the recipe wants of linear layers: of most of them, then of others.
        """
        return None

    def knows(self, family: Family | None) -> bool:
        """Whether it can work on models of a family; None is one that nothing declares."""
        return family is not None or not self.needs_declaration

    def idle(self, model: FloatModel) -> str | None:
        """Why a plan may leave it out of a model, in which it would change nothing; else None."""
        return None

    def view(self, model: FloatModel) -> FloatModel:
        """The float model as this method has it seen, before anything is observed.

        Raises:
            RecipeError: the method does not know this model.
        """
        return model

    def algorithm(self) -> Method | None:
        """What works on the blocks; None where the view is all."""
        return None

    def explain(self, layer: PlannedLayer) -> Iterator[str]:
        """What it does to a layer: a line each, such as `rtn: rounded ...`."""
        yield from ()

    def memory(self, block: BlockSizes) -> int:
        """Bytes that it holds beside a block's weights, statistics and second moments."""
        return 0

    def without_samples(self, strengths: Sequence[float]) -> tuple[str, str] | None:
        """Advice for doing without samples, and the `option=value` of it; None where that fails.

        Args:
            strengths: Those that the method has chosen in an earlier run of the model.
        """
        return None


def fixed_alpha(strengths: Sequence[float]) -> tuple[str, str]:
    """`without_samples` of a method that searches a strength: the middle of those found."""
    alpha = f"{median_high(strengths):g} (the middle of those found)" if strengths else "0.5"
    return "give alpha a number", f"alpha={alpha}"


def smoothing_lines(
    method: str, layer: PlannedLayer, kinds: Sequence[SmoothingKind]
) -> Iterator[str]:
    """`explain` of a method that moves factors through smoothing groups of some kinds."""
    for group in layer.groups:
        if group.kind not in kinds:
            continue
        if layer.name in group.consumers:
            yield f"{method}: its columns take factors that {group.source} is divided by"
        elif layer.name == group.source:
            readers = ", ".join(name.rpartition(".")[2] for name in group.consumers)
            yield f"{method}: its rows are divided by factors that {readers} takes"


def smoothing_memory(kinds: Sequence[SmoothingKind], samples: int, block: BlockSizes) -> int:
    """`memory` of a search over smoothing groups.

    Outputs of the samples and of the modules before the group, and the group's weights once more.
    """
    outputs = samples * (FLOAT * block.tokens * block.hidden + block.sample_bytes)
    consumers = max((block.consumers.get(kind, 0) for kind in kinds), default=0)
    return outputs + FLOAT * consumers + 16 * block.largest + block.sample_bytes
