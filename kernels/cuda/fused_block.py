"""From one attention to the next, or with it, in one kernel, for one or two tokens on Hopper.

    total = x W_o + residual                          h = silu(n W_gate) * n W_up,  n = norm(total)
    total = total + h W_down                          qkv = norm'(total) W_qkv of the next block

Of a mixture of experts h W_down is the weighted sum of the chosen experts', of one token. Seven
kernels otherwise, eleven of a mixture. What these lose with few tokens is memory that stands idle:
between two products, each of which asks for its first weights when the one before has ended. Here a
program on each SM walks through the four products, and asks for weights in one order, into rings in
shared memory that are filled without regard to where the product is: each warp has a ring of its
own, and its lanes copy into it. (Bulk copies are no faster.)

- A program owns whole outputs of each product, its warps blocks of 128 inputs. The sums of the
  warps are added in their order; a result does not depend on time.
- Programs hand on rows by values in memory that are blank until they are written, and the reader
  reads until none is: a barrier would take a round trip more, and there is no counter. All
  programs must run at once, as a cooperative launch ensures.
- bf16 inputs of 4-bit weights become integers of 16 bits with a unit for each 128 of them (what the
  CPU's kernels do):
  two bytes are two columns of a product of 8-bit integers, whose sums are exact. So eight packed
  weights take three instructions, and results differ from those of the single kernels by less
  than bf16 inputs are rounded by.
- 8-bit weights of 8-bit inputs have the exact sums and the roundings of the single kernels. What
  has a static scale is handed on as integers; else, and after norms, each program quantizes
  what it reads.
- All programs compute some of a router's outputs and hand these on, too; then each chooses the
  experts for itself.

Weights are those that `kernels.triton.linear` packs, `weight_only` and `w8a8`; nothing is held
twice.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from kernels.cpu.structures import pointer
from kernels.cuda.attention import Attention, AttentionShape, CacheArguments
from kernels.cuda.nvrtc import CudaKernel
from kernels.triton.common import require
from kernels.triton.linear.packing import BLOCK
from kernels.triton.linear.w8a8 import W8A8Weight
from kernels.triton.linear.weight import InputFormat
from kernels.triton.linear.weight_only import W4A16Weight

SOURCE = Path(__file__).with_name("fused_block.cu")
MOST_ROWS = 2
GROUP = 16  # outputs that a program owns whole
CHUNK = 2  # groups of a slot
MOST_CHOSEN = 32  # experts of a token
Weight = W4A16Weight | W8A8Weight
DEEPEST = 3  # slots of a ring: with more, what programs hand on waits for weights


@dataclass(frozen=True)
class BlockShape:
    """Sizes of what a block is made of.

    Attributes:
        attention: Inputs of o.
        hidden: Channels.
        inner: Inputs of down, of a mixture of one expert's.
        qkv: Outputs of q, k and v together.
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
        widest = GROUP * max(most[0], 2 * most[1], most[3])
        slot = CHUNK * GROUP * (BLOCK if self.bits == 8 else BLOCK // 2 + 4)
        choices = 4 * max(1, -(-self.experts // programs)) + 8 * self.chosen
        of_warp = depth * (slot + 8) + 4 * rows * widest + 4 + 4 * rows + choices
        x = max(self.inputs) * rows * (1 if self.bits == 8 else 2)
        if self.heads is not None:
            x = max(x, self.heads.shared(self.warps))
        of_rows = max(self.inputs) // BLOCK * 8 * rows + 8 * rows + 4 * max(1, self.experts)
        return self.warps * of_warp + x + of_rows + 64

    def values(self, rows: int, programs: int, depth: int) -> dict[str, int]:
        """What the source is compiled with."""
        own = {name.upper(): int(x) for name, x in asdict(self).items() if name != "heads"}
        own |= {"KV_HEADS": 0} if self.heads is None else self.heads.values(rows, programs)
        launch = {"ROWS": rows, "PROGRAMS": programs, "WARPS": self.warps, "DEPTH": depth}
        shared = self.shared(rows, programs, depth)
        return own | launch | {"CHUNK": CHUNK, "SHARED": shared}


class _Arguments(ctypes.Structure):
    _fields_ = (
        ("weight", ctypes.c_void_p * 4),
        ("scale", ctypes.c_void_p * 4),
        ("bias", ctypes.c_void_p * 4),
        ("static_scale", ctypes.c_void_p * 4),
        ("sinks", ctypes.c_void_p * 4),
        ("x", ctypes.c_void_p),
        ("x_scale", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("norm", ctypes.c_void_p * 2),
        ("total", ctypes.c_void_p),
        ("qkv", ctypes.c_void_p),
        ("exchanged", ctypes.c_void_p),
        ("launches", ctypes.c_void_p),
        ("router", ctypes.c_void_p),
        ("eps", ctypes.c_float),
        ("factor", ctypes.c_float),
        ("normalized", ctypes.c_int),
        ("x_scaled", ctypes.c_int),
        ("cache", CacheArguments),
    )


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
    """What stands between two attentions.

    Attributes:
        o: [hidden, attention].
        gate_up: [2 inner, hidden], gate first; of a mixture the first expert's, the others' being
            after it in memory.
        down: [hidden, inner], likewise.
        qkv: [qkv, hidden], of the next block.
        norms: Weights of the norms before gate and up and before q, k and v, bf16 [hidden].
        inputs: How each of the four wants its input.
        router: Of a mixture, or None.
    """

    o: Weight
    gate_up: Weight
    down: Weight
    qkv: Weight
    norms: tuple[Tensor, Tensor]
    inputs: Sequence[InputFormat]
    router: Router | None = None

    @property
    def weights(self) -> Sequence[Weight]:
        """In the order in which they multiply."""
        return self.o, self.gate_up, self.down, self.qkv

    @property
    def places(self) -> Sequence[tuple[int | None, ...]]:
        """Where the integers, scales and biases are."""
        own = ((w.packed, w.scale, w.bias) for w in self.weights)
        return [tuple(map(pointer, tensors)) for tensors in zip(*own, strict=True)]

    @cached_property
    def shape(self) -> BlockShape | None:
        """The shape that the kernel is compiled for; None where it does not take these.

        It takes 1,024 channels or more, and 4-bit weights in groups of 128 inputs with scales of 32
        bits for bf16 inputs, or int8 weights for int8 inputs with one scale a row, known or not.
        """
        (hidden, attention), inner, qkv = self.o.size, self.down.size[1], self.qkv.size[0]
        sizes = [(hidden, attention), (2 * inner, hidden), (hidden, inner), (qkv, hidden)]
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
        if all(w.family == "w8a8" for w in self.weights):
            whole = all(own.group is own.length is None for own in self.inputs)
            static = all(self.inputs[product].scale is not None for product in (0, 2))
            return (8, False, static) if whole else None
        found = [w for w in self.weights if isinstance(w, W4A16Weight)]
        zeros = {w.zero_points for w in found}
        alike = len(found) == len(self.weights) and len(zeros) == 1
        right = all(w.group == BLOCK and w.scale.element_size() == 4 for w in found)
        return (4, zeros.pop(), False) if alike and right else None


class FusedBlocks:
    """The kernel for blocks of one shape and so many tokens, and what its launches share.

    Launches of one object must follow each other on one stream.

    Args:
        rows: Tokens, 1 or 2.
        device: An sm_90.

    Raises:
        ValueError: a program of this shape does not fit on an SM.
        CompilerMissingError: see `CudaKernel`.
    """

    def __init__(self, shape: BlockShape, rows: int, device: torch.device) -> None:
        require(1 <= rows <= MOST_ROWS, f"{rows} tokens; needed are 1 to {MOST_ROWS}")
        properties = torch.cuda.get_device_properties(device)
        room = properties.shared_memory_per_block_optin
        programs = shape.programs(properties.multi_processor_count)
        require(not shape.experts or rows == 1, f"{rows} tokens of a mixture; needed is 1")
        require(shape.fits(programs), f"{programs} programs would own outputs of two experts")
        fitting = [d for d in range(2, DEEPEST + 1) if shape.shared(rows, programs, d) <= room]
        require(
            bool(fitting),
            f"{shape} takes {shape.shared(rows, programs, 2)} bytes of shared memory with "
            f"{rows} tokens; there are {room}",
        )
        depth, self._programs = fitting[-1], programs
        self._shape, self._rows, self._threads = shape, rows, 32 * shape.warps
        values = shape.values(rows, programs, depth)
        self._kernel = CudaKernel(SOURCE, "fused_block", values, values["SHARED"])
        of_inner = 2 if shape.bits == 4 else 1 if shape.static else 4  # bytes
        handed_on = rows * (4 * shape.hidden + of_inner * shape.inputs[2]) + 4 * shape.experts
        if shape.heads is not None:
            splits = shape.heads.splits(rows, programs)
            require(splits > 0, f"{programs} programs for {shape.heads.kv_heads} heads of {rows}")
            handed_on += shape.heads.handed_on(rows, programs, of_inner)
        self._exchanged = torch.full((2, handed_on), -1, dtype=torch.int8, device=device)
        self._launches = torch.zeros(1, dtype=torch.int32, device=device)

    def run(
        self,
        weights: BlockWeights,
        x: Tensor | Attention,
        x_scale: Tensor | None,
        residual: Tensor,
        eps: float,
        sinks: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run what stands between two attentions, with the first of them if the shape has one.

        Args:
            weights: Of this shape, but for its attention.
            x: The attention; or what it gives, as o wants it: bf16 or int8 [rows, attention],
                contiguous.
            x_scale: Of int8 rows, fp32 of one element or of one a row.
            residual: The residual stream, bf16 [rows, hidden], contiguous.
            eps: Added to mean squares by the norms.
            sinks: int32 [rows], 1 for sink tokens, where these have input scales of their own.

        Returns:
            (the residual stream after the block, bf16 [rows, hidden]; q, k and v of the next
            block, bf16 [rows, qkv]).

        Raises:
            ValueError: a shape or type is another.
        """
        shape, rows = self._shape, self._rows
        needed = replace(shape, heads=None)
        require(weights.shape == needed, f"weights are of {weights.shape}; needed is {needed}")
        _check("the residual", residual, torch.bfloat16, (rows, shape.hidden))
        of_x = 0 if x_scale is None else x_scale.numel()
        given, cache = self._checked(x, of_x)
        total, qkv = torch.empty_like(residual), residual.new_empty(rows, shape.qkv)
        place, router = pointer, weights.router
        scales = [own.scales_of(sinks) for own in weights.inputs]  # and which is each row's
        arguments = _Arguments(
            *weights.places,
            tuple(place(known) for known, _ in scales),
            tuple(place(which) for _, which in scales),
            *map(place, (given, x_scale, residual)),
            tuple(map(place, weights.norms)),
            *map(place, (total, qkv, self._exchanged, self._launches)),
            None if router is None else place(router.weight),
            eps,
            1.0 if router is None else router.factor,
            router is not None and router.normalized,
            of_x > 1,
            cache,
        )
        self._kernel.launch(self._programs, self._threads, arguments)
        return total, qkv

    def _checked(self, x: Tensor | Attention, scales: int) -> tuple[Tensor | None, CacheArguments]:
        """(rows of o, what attention reads) of which a launch has one; `scales` are those of rows.

        Raises:
            ValueError: it is the other one, or a shape or type is another.
        """
        shape, rows = self._shape, self._rows
        if isinstance(x, Tensor):
            own_type = torch.int8 if shape.bits == 8 else torch.bfloat16
            _check("x", x, own_type, (rows, shape.attention))
            allowed = sorted({1, rows}) if shape.bits == 8 else [0]
            require(scales in allowed, f"x has {scales} scales; needed is one of {allowed}")
            require(shape.heads is None, f"x is {type(x).__name__}, for {shape}")
            return x, CacheArguments()
        if shape.heads is None:
            raise ValueError(f"x is {type(x).__name__}, for {shape}")
        return None, x.arguments(shape.heads)


def _check(what: str, found: Tensor, dtype: torch.dtype, size: tuple[int, int]) -> None:
    require(
        found.shape == size and found.dtype == dtype and found.is_contiguous(),
        f"{what} is {found.dtype} {tuple(found.shape)}; needed is contiguous {dtype} {size}",
    )
