"""What a run takes of the machine: devices, memory of the host and of a GPU, and room on the disk.

The driver holds one block, the hidden states of all samples and one shard (`ptq.pipeline.driver`).
What comes on top depends on the step: each has its own sum here, and the largest is the peak. The
process itself stays out.

    embedding   the whole table in fp32 beside the stored one
    measuring   quantized weights as integers and in fp32; sums of squares of one layer in fp64
    backward    hidden states before every block, in memory or as bf16 on the disk; activations of
                one sample with what their gradients need, or its logits
    observing   fp32 [in, in] for each distinct input, where second moments are wanted, and for each
                layer, where gradients are; once more while the samples run, on each device
    solving     what each method says that it takes (`MethodSpec.memory`)
    head        the same of some rows of it, where it is quantized (`ptq.plan.modules`)

Blocks run on a GPU where there is one: then the host holds the hidden states and what is written.
Of several GPUs the first holds the most: these figures are of that one.

Devices are where blocks are solved, and the report's; whether they are here is checked first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter

import torch

from calibrate.backward import IN_MEMORY
from calibrate.gradients import block_size, gradient_bytes
from formats.families.block_layers import SMOOTHING_KINDS
from formats.modeling.layers import embedding_name
from kernels.devices import check_device
from ptq.methods.common.float_model import FloatModel
from ptq.methods.common.spec import FLOAT, BlockSizes, MethodSpec
from ptq.plan.modules import HEAD_STAGES, BlockShape, piece_rows, shard_bytes
from ptq.plan.schedule import KEPT_MOMENTS, Schedule
from ptq.recipe.problems import Faults
from ptq.recipe.schema import DevicesSpec, Recipe

OCCUPIED = 6000  # bins of a histogram that magnitudes of activations fall into, at 16 bytes


@dataclass(frozen=True)
class Footprint:
    """What a run holds; see the module's docstring.

    Args:
        source: The model; only its headers are read.
        checkpoint_bytes: Of the checkpoint that is written.
        on_gpu: Whether blocks run on a GPU.
        head: Shape of the head, (out, in), where it is quantized.
    """

    recipe: Recipe
    source: FloatModel
    blocks: Sequence[BlockShape]
    checkpoint_bytes: int
    on_gpu: bool
    head: tuple[int, int] | None = None

    def host(self) -> int:
        """Peak bytes of host memory.

        While the largest tensor outside of the blocks is checked, there are the one before it and
        two more of its size. Of the head there are the original, its integers, and what a
        checkpoint gets of them.
        """
        start, solving = self._backward.kept(), self._states() + self._written()
        head = self._states() + 4 * math.prod(self.head or (0,))
        if not self.on_gpu:
            start = max(_embedding(self.source), start + self._backward.work())
            solving, head = solving + self._block_work(), head + self._head_work()
        return max(start, 4 * _widest_rest(self.source, self.blocks), solving, head)

    def device(self) -> int:
        """Peak bytes of a GPU's memory; 0 where none is used."""
        if not self.on_gpu:
            return 0
        work = self._backward.work(), self._block_work(), self._head_work()
        return max(_embedding(self.source), *work)

    def disk(self) -> int:
        """Most bytes on the disk before the run ends: what it makes, and what it can go on with.

        The states after a block are written before those after the one before it are removed.
        """
        resumable = self.checkpoint_bytes + 2 * self._copies * self._state_bytes
        kept = self.moments() + self.factors()
        made = self.checkpoint_bytes + kept + 2 * self._histograms()
        return made + self._backward.disk() + (resumable if self._schedule.needs_data else 0)

    def moments(self) -> int:
        """Bytes of the second moments that are kept on the disk: of each pass of the samples."""
        total = self._schedule.runs * sum(map(_hessians, self.blocks))
        return _kept(self.recipe.statistics.hessians, self._schedule.full_moments, total)

    def factors(self) -> int:
        """Bytes of the Fisher factors that are kept on the disk: A of each pass, and G."""
        total = self._schedule.runs * sum(map(_weighted, self.blocks))
        total += self._backward.gradients(self.blocks)
        return _kept(self.recipe.statistics.gradients, self._schedule.gradients, total)

    @cached_property
    def _schedule(self) -> Schedule:
        return Schedule.of(self.recipe)

    @property
    def _backward(self) -> _Backward:
        return _Backward(self.recipe, self._schedule, self.source, self.blocks)

    @property
    def _copies(self) -> int:
        """Sets of hidden states that a block gets: of the float model, and quantized."""
        return 2 if any(method.quantized_path for method in self._schedule.methods) else 1

    @property
    def _state_bytes(self) -> int:
        """Of the hidden states of all samples; pinned memory comes in powers of two."""
        sample = FLOAT * _sample_tokens(self.recipe) * max(block.row for block in self.blocks)
        held = 1 << (sample - 1).bit_length() if self.on_gpu else sample
        return self._schedule.samples * held

    def _states(self) -> int:
        """Hidden states at their most, on the host.

        A block's inputs and outputs while it is solved (refinement has targets, too); or what is
        left of them and its bytes while they are stored. A GPU's pinned copies stay for reuse.
        Beside them is what each block is handed of each sample.
        """
        handed = sum(block.handed for block in self.blocks)
        beside = FLOAT * self._schedule.samples * _sample_tokens(self.recipe) * handed
        solving = 2 + (2 if self._copies == 2 else 0)
        storing = self._copies if self._schedule.needs_data else 0
        sets = solving + storing if self.on_gpu else max(solving, self._copies + storing)
        return sets * self._state_bytes + beside

    def _block_work(self) -> int:
        """Bytes of the step of the largest block that takes most, where it runs."""
        block, tokens = max(self.blocks, key=attrgetter("elements")), _sample_tokens(self.recipe)
        each, beside = self._sums(block)
        sample = _activations(block, tokens)
        sizes = BlockSizes(
            quantized=block.quantized,
            hidden=block.hidden,
            tokens=tokens,
            sample_bytes=sample,
            consumers={kind: block.consumers(kind) for kind in SMOOTHING_KINDS},
        )
        devices = 1 if isinstance(self.recipe.device, str) else self.recipe.device.cpus or 1
        observing = devices * (each + sample)  # devices that work in one memory
        kept = FLOAT * block.elements + each + beside
        return kept + max(observing, _solving(sizes, self.recipe.methods))

    def _sums(self, block: BlockShape) -> tuple[int, int]:
        """Second moments of the samples that a device runs next to each other; and what is kept
        beside theirs, G and the widest's mean where no step counts it."""
        each = beside = 0
        if self._schedule.gradients:
            each, beside = _weighted(block), self._backward.gradients([block])
        if self._schedule.full_moments or self.recipe.statistics.hessians is True:
            widest = max((columns for _, columns in block.quantized), default=0)
            each += _hessians(block)
            beside += 0 if self._schedule.full_moments else FLOAT * widest**2
        return each, beside

    def _head_work(self) -> int:
        """Solving some rows of the head."""
        if self.head is None:
            return 0
        rows, inputs = piece_rows(self.head), self.head[1]
        tokens = _sample_tokens(self.recipe)
        sizes = BlockSizes(
            [(rows, inputs)], inputs, tokens, 8 * FLOAT * tokens * (inputs + rows), {}
        )
        sums = (2 if self._schedule.gradients else 1) * FLOAT * inputs**2
        specs = [spec for spec in self.recipe.methods if spec.stage in HEAD_STAGES]
        return FLOAT * sizes.elements + sums + _solving(sizes, specs)

    def _written(self) -> int:
        """A shard with its bytes, the block that comes next, and statistics of all blocks."""
        largest = max(block.elements for block in self.blocks)
        shard = min(shard_bytes(largest), self.checkpoint_bytes)
        return 2 * shard + largest + self._histograms()

    def _histograms(self) -> int:
        """Statistics of all inputs and caches."""
        if not self._schedule.counts(0):
            return 0
        tensors = sum(len(block.inputs(block.layers)) for block in self.blocks)
        heads = 2 * sum(block.kv_heads for block in self.blocks)
        return 16 * OCCUPIED * (tensors + heads)


@dataclass(frozen=True)
class _Backward:
    """What gradients take: nothing where no method wants them."""

    recipe: Recipe
    schedule: Schedule
    source: FloatModel
    blocks: Sequence[BlockShape]

    def gradients(self, blocks: Sequence[BlockShape]) -> int:
        """G of the layers of some blocks, as large as those of all blocks allow."""
        size = block_size(_widths(self.blocks), KEPT_MOMENTS)
        heads = sum(2 * block.cached**2 // max(block.kv_heads, 1) for block in blocks)
        sequences = sum(FLOAT * block.hidden**2 for block in blocks)  # of K and V, in bf16
        return gradient_bytes(_widths(blocks), size) + FLOAT * heads + sequences

    def work(self) -> int:
        """A block with a sample's activations, what gradients need of them, and G; or the head."""
        if not self.schedule.gradients:
            return 0
        block, length = max(self.blocks, key=attrgetter("elements")), _sample_tokens(self.recipe)
        through = FLOAT * block.elements + 3 * _activations(block, length)
        vocabulary = self.source.shape(f"{embedding_name(self.source.config)}.weight")[0]
        head = 2 * FLOAT * vocabulary * block.hidden + 4 * FLOAT * vocabulary * length
        return max(through + self.gradients([block]), head)

    def kept(self) -> int:
        """Inputs of blocks in memory, beside those of one, its outputs and their gradients."""
        return 3 * self._inputs // len(self.blocks) + (0 if self._filed else self._inputs)

    def disk(self) -> int:
        """G, |g_t|^2 of each token that is run backward, of each layer, and inputs in files."""
        if not self.schedule.gradients:
            return 0
        layers = sum(len(block.layers) + 2 * block.kv_heads for block in self.blocks)
        powers = FLOAT * layers * self._tokens
        return self.gradients(self.blocks) + powers + (self._inputs // 2 if self._filed else 0)

    @property
    def _tokens(self) -> int:
        """Tokens that are run backward: whole samples."""
        length, wanted = _sample_tokens(self.recipe), self.recipe.statistics.gradient_tokens
        return length * min(self.schedule.samples, max(wanted // length, 1))

    @property
    def _inputs(self) -> int:
        """Bytes of the hidden states before every block, fp32, of what is run backward."""
        if not self.schedule.gradients:
            return 0
        return FLOAT * self._tokens * sum(block.row for block in self.blocks)

    @property
    def _filed(self) -> bool:
        """Whether they are kept in files."""
        return self._inputs > IN_MEMORY


def _sample_tokens(recipe: Recipe) -> int:
    return recipe.dataset.calibration.sequence_length


def _solving(sizes: BlockSizes, specs: Iterable[MethodSpec]) -> int:
    """The most that measuring, or a method, takes beside a block's weights and sums."""
    measured = (1 + FLOAT) * sizes.elements + max(24 * sizes.largest, sizes.sample_bytes)
    return max([measured, *(spec.memory(sizes) for spec in specs)])


def _activations(block: BlockShape, tokens: int) -> int:
    """What one sample needs on its way through a block, watched: histograms, fp64 powers."""
    widest = max(max(shape) for shape in block.layers.values())
    feed_forward = 3 * widest + 4 * block.hidden + block.query + 2 * block.cached
    watched = 4 * 8 * widest
    return tokens * (FLOAT * (feed_forward + tokens) + watched)


def _hessians(block: BlockShape) -> int:
    """Second moments of a block's inputs."""
    inputs = block.inputs(block.targets).values()
    return sum(FLOAT * block.width(names) ** 2 for names in inputs)


def _weighted(block: BlockShape) -> int:
    """A of the Fisher factors: each layer has its own."""
    return sum(FLOAT * columns**2 for _, columns in block.quantized)


def _embedding(source: FloatModel) -> int:
    """The stored table, and the same in fp32."""
    name = f"{embedding_name(source.config)}.weight"
    return math.prod(source.shape(name)) * (source.dtype(name).itemsize + FLOAT)


def _widest_rest(source: FloatModel, blocks: Sequence[BlockShape]) -> int:
    """Bytes of the largest tensor outside of the blocks."""
    inside = tuple(f"{block.name}." for block in blocks)
    rest = [name for name in source.names() if not name.startswith(inside)]
    return max(math.prod(source.shape(name)) * source.dtype(name).itemsize for name in rest)


def _widths(blocks: Sequence[BlockShape]) -> list[int]:
    """Outputs of each linear layer of some blocks."""
    return [rows for block in blocks for rows, _ in block.layers.values()]


def _kept(wanted: bool | str, used: bool, total: int) -> int:
    """Bytes that are kept of `total`: all where that is asked for, or they are used and few."""
    return total if wanted is True or (wanted and used and total <= KEPT_MOMENTS) else 0


def on_gpu(recipe: Recipe) -> bool:
    """Whether blocks will be run and solved on a GPU."""
    if recipe.device == "auto":
        return torch.cuda.is_available()
    return not recipe.without_gpu


def devices_of(recipe: Recipe) -> list[torch.device]:
    """Where blocks are run and solved; that the devices are here, the plan has checked."""
    kind, chosen = "cuda" if on_gpu(recipe) else "cpu", recipe.device
    if isinstance(chosen, str):
        return [torch.device(kind)]
    if chosen.gpus is None:
        return [torch.device(kind)] * (chosen.cpus or 1)
    return [torch.device(kind, index) for index in range(chosen.gpus)]


def check_devices(recipe: Recipe, solves: bool) -> Faults:
    """Devices that nothing can run on here: the report's and, if blocks are solved, theirs."""
    if solves and on_gpu(recipe) and not torch.cuda.is_available():
        found = repr(recipe.device) if isinstance(recipe.device, str) else "gpus"
        yield (
            ("device",),
            f"found {found}, but {_no_gpu()}; set device: auto, which takes a GPU where there is "
            "one, or cpu",
        )
    elif solves and isinstance(recipe.device, DevicesSpec) and recipe.device.gpus:
        yield from _check_gpus(recipe.device.gpus)
    if recipe.report.device == "auto":
        return
    try:
        chosen = recipe.report.device
        several = not isinstance(chosen, str)
        names = [f"cuda:{i}" for i in range(chosen.gpus or 0)] if several else [chosen]
        for device in names:
            check_device(device)
    except ValueError as error:
        yield ("report", "device"), str(error)


def _check_gpus(wanted: int) -> Faults:
    """That there are so many GPUs, and that they compute alike."""
    there = torch.cuda.device_count()
    if wanted > there:
        yield (
            ("device", "gpus"),
            f"found {wanted}, but torch sees {there} here; give at most {there}",
        )
        return
    kinds = dict.fromkeys(map(torch.cuda.get_device_name, range(wanted)))
    if len(kinds) > 1:
        yield (
            ("device", "gpus"),
            f"found {wanted}, which are {' and '.join(kinds)}; what comes out would depend on "
            "which does what: give as many as are of one kind, and show torch these alone "
            "(CUDA_VISIBLE_DEVICES)",
        )


def _no_gpu() -> str:
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is one without CUDA"
    return f"torch {torch.__version__} sees no GPU here (`nvidia-smi` tells whether there is one)"
