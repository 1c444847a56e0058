"""What a block in one kernel is made of: its sizes, and its weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, asdict, dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from kernels.cpu.structures import pointer
from kernels.cuda.attention import AttentionShape
from kernels.cuda.nvrtc import TensorMap, tensor_map
from kernels.triton.linear.packing import BLOCK
from kernels.triton.linear.w8a8 import W8A8Weight
from kernels.triton.linear.w16a16 import DenseWeight
from kernels.triton.linear.weight import InputFormat
from kernels.triton.linear.weight_only import W4A16Weight

FEW_ROWS = 2  # up to which sums of the warps have places beside int8 inputs, and stand close
GROUP = 16  # outputs that a program owns whole
MOST_CHOSEN = 32  # experts of a token
Weight = W4A16Weight | W8A8Weight | DenseWeight


@dataclass(frozen=True)
class BlockShape:
    """Sizes of what a block is made of.

    Attributes:
        attention: Inputs of o.
        hidden: Channels.
        inner: Inputs of down, of a mixture of one expert's.
        qkv: Outputs of q, k and v together; 0 after the last block.
        bits: Of weights.
        zeros: Whether weights have zero points.
        static: Whether inputs of o and of down are int8 by static scales.
        experts: Of a mixture; 0 without one.
        chosen: How many of them a token goes to; 1 without.
        heads: Of the attention that the kernel begins with; None where it begins with o.
    """

    attention: int
    hidden: int
    inner: int
    qkv: int
    bits: int = 4
    zeros: bool = False
    static: bool = False
    experts: int = 0
    chosen: int = 1
    heads: AttentionShape | None = None

    @property
    def inputs(self) -> tuple[int, ...]:
        """Of the four products."""
        return self.attention, self.hidden, self.chosen * self.inner, self.hidden

    @property
    def groups(self) -> tuple[int, ...]:
        """Groups of outputs of the four products, of gate and up of each."""
        sizes = self.hidden, self.chosen * self.inner, self.hidden, self.qkv
        return tuple(n // GROUP for n in sizes)

    def programs(self, processors: int) -> int:
        """Programs of a launch: as few as let none own more than with one for each processor."""
        return max(-(-n // -(-n // processors)) for n in self.groups[:3])

    @property
    def most_rows(self) -> int:
        """Tokens up to which a block in one kernel is faster than single kernels, as measured."""
        return 1 if self.experts else 4

    @property
    def chunk(self) -> int:
        """Groups of outputs in a slot."""
        return 1 if self.bits == 16 else 2

    @property
    def warps(self) -> int:
        """Of a program: 16, or 8 where inputs have fewer blocks."""
        return 16 if min(self.inputs) >= 16 * BLOCK else 8

    def fits(self, programs: int) -> bool:
        """Whether no program owns outputs of two experts."""
        most = -(-self.groups[1] // programs)
        return self.inner % BLOCK == 0 and (not self.experts or self.inner // GROUP % most == 0)

    def shared(self, rows: int, programs: int, depth: int) -> int:
        """Bytes of shared memory of a program: the source's `Memory`, which it checks."""
        most = [-(-n // programs) for n in self.groups]
        whole, few = self.bits == 8, rows <= FEW_ROWS
        widest = GROUP * max(most[0], 2 * most[1], most[3]) + (0 if few else 8)
        slot = self.chunk * GROUP * {4: BLOCK // 2 + 4, 8: BLOCK, 16: 2 * BLOCK}[self.bits]
        choices = 4 * max(1, -(-self.experts // programs)) + 8 * self.chosen
        of_warp = depth * (slot + 8) + 8 * rows + choices
        parts = 4 * self.warps * rows * widest
        chosen_by = self.hidden // BLOCK if self.experts else 0
        laid = max(self.inputs) // BLOCK if whole else max(self.warps, chosen_by)
        x = laid * BLOCK * rows * (1 if whole else 2)
        if self.heads is not None:
            x = max(x, self.heads.shared(self.warps, rows))
        x = max(x, parts) if whole and not few else x + parts
        of_rows = laid * 8 * rows + 8 * rows + 4 * max(1, self.experts) + 8
        return self.warps * of_warp + x + of_rows + 64

    def values(self, rows: int, programs: int, depth: int) -> dict[str, int]:
        """What the source is compiled with."""
        own = {name.upper(): int(x) for name, x in asdict(self).items() if name != "heads"}
        own |= {"KV_HEADS": 0} if self.heads is None else self.heads.values(rows, programs)
        launch = {"ROWS": rows, "PROGRAMS": programs, "WARPS": self.warps, "DEPTH": depth}
        shared = self.shared(rows, programs, depth)
        return own | launch | {"CHUNK": self.chunk, "SHARED": shared}


@dataclass(frozen=True)
class Router:
    """How a mixture chooses: the best by softmax of `weight` times a row.

    Attributes:
        weight: bf16 [experts, hidden].
        chosen: Experts of a token.
        normalized: Whether the weights of these are divided by their sum.
        factor: Of them.
    """

    weight: Tensor
    chosen: int
    normalized: bool
    factor: float


@dataclass(frozen=True)
class BlockWeights:
    """What stands between two attentions, or after the last.

    Attributes:
        o: [hidden, attention].
        gate_up: [2 inner, hidden], gate first; of a mixture the first expert's, the others' being
            after it in memory.
        down: [hidden, inner], likewise.
        qkv: [qkv, hidden], of the next block; None after the last.
        norms: Weights of the norms before gate and up and, unless this is the last block, before q,
            k and v, bf16 [hidden].
        inputs: How each of them wants its input.
        router: Of a mixture, or None.
    """

    o: Weight
    gate_up: Weight
    down: Weight
    qkv: Weight | None = None
    _: KW_ONLY
    norms: Sequence[Tensor]
    inputs: Sequence[InputFormat]
    router: Router | None = None

    @property
    def weights(self) -> Sequence[Weight]:
        """In the order in which they multiply."""
        last = () if self.qkv is None else (self.qkv,)
        return self.o, self.gate_up, self.down, *last

    @property
    def places(self) -> Sequence[tuple[int | None, ...]]:
        """Where the weights, scales and biases are."""
        own = (
            (w.weight, None, w.bias) if isinstance(w, DenseWeight) else (w.packed, w.scale, w.bias)
            for w in self.weights
        )
        return [tuple(map(pointer, tensors)) for tensors in zip(*own, strict=True)]

    @cached_property
    def maps(self) -> tuple[TensorMap, ...]:
        """How TMA reads weights in bf16; none of others."""
        dense = [w.weight for w in self.weights if isinstance(w, DenseWeight)]
        return tuple(tensor_map(weight, GROUP) for weight in dense)

    @cached_property
    def shape(self) -> BlockShape | None:
        """The shape that the kernel is compiled for; None where it does not take these.

        It takes 1,024 channels or more, and for bf16 inputs weights in bf16 or of 4 bits in groups
        of 128 inputs with scales of 32 bits, or int8 weights for int8 inputs with one scale a row,
        static or not.
        """
        (hidden, attention), inner = self.o.size, self.down.size[1]
        qkv = 0 if self.qkv is None else self.qkv.size[0]
        sizes = [(hidden, attention), (2 * inner, hidden), (hidden, inner), (qkv, hidden)]
        sizes = sizes[: len(self.weights)]
        chosen = 1 if self.router is None else self.router.chosen
        fit = sizes == [w.size for w in self.weights]
        large = min(hidden, attention, chosen * inner) >= 8 * BLOCK
        normed = all(n.dtype == torch.bfloat16 and n.shape == (hidden,) for n in self.norms)
        if not (fit and large and normed):
            return None
        found = self._format()
        if found is None:
            return None
        shape, router = BlockShape(attention, hidden, inner, qkv, *found), self.router
        if router is None:
            return shape
        right = router.weight.dtype == torch.bfloat16 and router.weight.is_contiguous()
        few = router.chosen <= MOST_CHOSEN and self.gate_up.bias is self.down.bias is None
        own = replace(shape, experts=len(router.weight), chosen=router.chosen)
        return own if right and few and shape.bits == 4 else None

    def _format(self) -> tuple[int, bool, bool] | None:
        """`bits`, `zeros` and `static`, where the kernel takes weights and inputs."""
        dense = [w for w in self.weights if isinstance(w, DenseWeight)]
        if len(dense) == len(self.weights):
            types = {w.weight.dtype for w in dense} | {own.dtype for own in self.inputs}
            whole = all(w.size[0] % GROUP == w.size[1] % BLOCK == 0 for w in dense)
            plain = whole and all(w.weight.is_contiguous() for w in dense)
            return (16, False, False) if plain and types == {torch.bfloat16} else None
        if all(w.family == "w8a8" for w in self.weights):
            whole = all(own.group is own.length is None for own in self.inputs)
            static = all(self.inputs[product].scale is not None for product in (0, 2))
            return (8, False, static) if whole else None
        found = [w for w in self.weights if isinstance(w, W4A16Weight)]
        zeros = {w.zero_points for w in found}
        alike = len(found) == len(self.weights) and len(zeros) == 1
        right = all(w.group == BLOCK and w.scale.element_size() == 4 for w in found)
        return (4, zeros.pop(), False) if alike and right else None
