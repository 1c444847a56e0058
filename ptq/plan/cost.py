"""How long a run will take: its operations, counted from shapes, by the machine's measured speed.

What a run does is known before it starts: which samples run through each block and how often
(`ptq.plan.schedule`), how many candidates a search tries, the steps of a refinement. They are
counted by kind (`ptq.plan.speed.Work`) and divided by the machine's speeds. The passes of each step
are those of the code that it names, counted by hand: the sum is good to about a factor of two.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from calibrate.attention import QUERIES
from ptq.methods.awq import AWQSpec
from ptq.methods.clip import ClipSpec
from ptq.methods.common.method import Method
from ptq.methods.common.moments import strips
from ptq.methods.common.rounding import FACTORS
from ptq.methods.common.smoothing_group import SmoothingKind
from ptq.methods.common.spec import MethodSpec, ScaleSearch
from ptq.methods.gptq import GPTQSpec
from ptq.methods.refine import RefineSpec
from ptq.methods.registry import block_methods
from ptq.methods.rtn import RTNSpec
from ptq.methods.shift import ShiftSpec
from ptq.methods.smooth_k import SmoothKSpec
from ptq.methods.smoothquant import SmoothQuantSpec
from ptq.pipeline.measure import SAMPLES
from ptq.plan.schedule import Schedule
from ptq.plan.shapes import BlockShape
from ptq.plan.speed import Work, total
from ptq.recipe.schema import Recipe

POWERS = 16  # passes over an output that is compared: two in fp32, seven in fp64
MEASURED = 8  # passes over one that `ptq.pipeline.measure` compares, all in fp32
ROUNDING = 12  # over a weight that gets scales and is rounded to nearest
FAKE = 8  # over an input that is quantized and back


class _Step(NamedTuple):
    phase: str
    work: Work


def count_work(
    recipe: Recipe, blocks: Sequence[BlockShape], checkpoint_bytes: int
) -> dict[str, Work]:
    """Operations of a run by phase, named as in the record of a run; reading data aside.

    Args:
        recipe: The run.
        blocks: The model's.
        checkpoint_bytes: Of the checkpoint that is written.
    """
    phases: dict[str, Work] = {}
    for block in blocks:
        for phase, work in _Counting(block, recipe).steps():
            phases[phase] = phases.get(phase, Work()) + work
    phases["write"] = _write(recipe, blocks, checkpoint_bytes)
    phases["load"] = Work(
        elements=4 * sum(block.elements for block in blocks), calls=20 * len(blocks)
    )
    return phases


def _attended(tokens: int) -> int:
    """Pairs of a query and a key that are multiplied (`calibrate.attention`)."""
    starts = range(0, tokens, QUERIES)
    return sum((min(s + QUERIES, tokens) - s) * min(s + QUERIES, tokens) for s in starts)


def _write(recipe: Recipe, blocks: Sequence[BlockShape], checkpoint_bytes: int) -> Work:
    """What goes to the disk; hidden states once, as they may take a tenth of the time at most."""
    hashes = 3  # as it is added, from the file, and read back
    nbytes = (hashes + 2) * checkpoint_bytes
    methods, data = (
        [method for _, method in block_methods(recipe.methods)],
        recipe.dataset.calibration,
    )
    if Schedule(recipe, methods).needs_data:  # what a stopped run goes on with
        sets = 2 if any(method.quantized_path for method in methods) else 1
        states = 4 * data.samples * data.sequence_length * blocks[0].hidden
        nbytes += checkpoint_bytes + sets * states
    return Work(nbytes=nbytes, calls=100 * len(blocks))


@dataclass(frozen=True)
class _Counting:
    """Operations of one block."""

    block: BlockShape
    recipe: Recipe

    def steps(self) -> list[_Step]:
        """What is done to the block, in the driver's order."""
        specs = [spec for spec, _ in block_methods(self.recipe.methods)]
        methods = [method for _, method in block_methods(self.recipe.methods)]
        schedule = Schedule(self.recipe, methods)
        samples = self.recipe.dataset.calibration.samples
        seen = samples if schedule.needs_data else min(samples, SAMPLES)
        steps = [_Step("observe", self._observe(methods, specs, schedule, 0) * seen)]
        steps.append(_Step("measure", self._measure() * 2 + self._cache()))
        for i, spec in enumerate(specs):
            if i in schedule.passes:
                steps.append(_Step("observe", self._observe(methods, specs, schedule, i) * seen))
            steps.append(_Step(spec.name, self._solve(spec)))
        if len(specs) in schedule.passes:
            again = self._observe(methods, specs, schedule, len(specs))
            steps.append(_Step("observe", again * seen))
        if any(method.quantized_path for method in methods):
            steps.append(_Step("forward", self._run() * seen))
        return steps

    @property
    def _tokens(self) -> int:
        return self.recipe.dataset.calibration.sequence_length

    def _run(self, *, observed: bool = False) -> Work:
        """One sample through the block (`Block.run`); all experts where it is observed."""
        block, tokens = self.block, self._tokens
        products, outputs = 0.0, 0.0
        for name, (rows, columns) in block.layers.items():
            share = 1.0 if observed else block.share_of(name)
            products += share * 2 * rows * columns
            outputs += share * rows
        return Work(
            products=tokens * products + 4 * _attended(tokens) * block.query,
            elements=tokens * (12 * block.hidden + 4 * outputs),
            calls=60 + 6 * len(block.layers),
        )

    def _observe(
        self,
        methods: Sequence[Method],
        specs: Sequence[MethodSpec],
        schedule: Schedule,
        first: int,
    ) -> Work:
        """One sample, watched for the methods from `first` on (`ptq.pipeline.passes.observe`)."""
        block, tokens, counts = self.block, self._tokens, schedule.counts(first)
        kinds = {method.moments for method in methods[first:]}
        full = "full" in kinds or (first == 0 and self.recipe.statistics.hessians)
        widths = [block.width(names) for names in block.inputs(block.layers).values()]
        wanted = [block.width(names) for names in block.inputs(block.targets).values()]
        seen = tokens * (sum(widths) + 2 * block.cached)
        parts = [
            self._run(observed=True),
            Work(elements=3 * seen, calls=12 * (len(widths) + 2)),
            Work(elements=4 * seen, counted=seen) if counts else Work(),
        ]
        if full:
            products = sum(
                2 * tokens * rows.stop * (rows.stop - rows.start)
                for k in wanted
                for rows in strips(k)
            )
            parts.append(Work(products=products, calls=20 * len(wanted)))
            parts.append(Work(elements=sum(k * k for k in wanted)))
        elif "diagonal" in kinds:
            parts.append(Work(elements=3 * tokens * sum(wanted), calls=3 * len(wanted)))
        return total(parts) + total([self._watched(spec) for spec in specs[first:]])

    def _watched(self, spec: MethodSpec) -> Work:
        """What a method itself does while one sample is observed."""
        block, tokens = self.block, self._tokens
        if isinstance(spec, AWQSpec):  # mean|X_j| in fp64, of each group's input
            groups = [group for tied in block.groups(spec.targets) for group in tied]
            widths = sum(block.width(group.consumers) for group in groups)
            return Work(elements=6 * tokens * widths, calls=5 * len(groups))
        if isinstance(spec, ShiftSpec):  # V once more, and its extremes
            work = tokens * block.cached
            return Work(products=2 * work * block.hidden, elements=4 * work, calls=6)
        return Work()

    def _solve(self, spec: MethodSpec) -> Work:
        """A method's `solve` and `commit`."""
        if isinstance(spec, SmoothQuantSpec):
            tried = len(spec.alphas) if spec.alpha == "search" else 1
            more = spec.pieces * tried if spec.pieces > 1 else 0
            return self._migration(spec.targets, 1 + tried + more, spec.search_samples)
        if isinstance(spec, AWQSpec):
            return self._migration(spec.targets, 1 + spec.steps, spec.search_samples)
        if isinstance(spec, SmoothKSpec):
            tried = 1 + (len(spec.alphas) if spec.alpha == "search" else 1)
            return self._smooth_k(tried, spec.search_samples)
        if isinstance(spec, ClipSpec):
            return self._clip(1 + len(spec.factors), spec.search_samples)
        if isinstance(spec, RTNSpec):
            return self._search(spec.scale)
        if isinstance(spec, GPTQSpec):
            return self._gptq(spec)
        return self._refine(spec) if isinstance(spec, RefineSpec) else Work()

    def _compared(self, quantized: Sequence[str] = ()) -> Work:
        """One sample through the block with some layers quantized, its output compared."""
        block, tokens = self.block, self._tokens
        passes = FAKE if self.recipe.scheme.activations is not None else 1
        inputs = sum(block.share_of(name) * block.layers[name][1] for name in quantized)
        elements = tokens * (passes * inputs + POWERS * block.hidden)
        return self._run() + Work(elements=elements, calls=10 * len(quantized) + 12)

    def _samples(self, most: int) -> int:
        return min(most, self.recipe.dataset.calibration.samples)

    def _migration(self, kinds: Sequence[SmoothingKind], tried: int, most: int) -> Work:
        """Every candidate of every group on the samples of the search (`ptq.methods.migration`)."""
        samples, parts = self._samples(most), [self._run() * self._samples(most)]
        for tied in self.block.groups(kinds):
            names = [name for group in tied for name in group.consumers]
            weights = sum(
                rows * columns for rows, columns in map(self.block.layers.__getitem__, names)
            )
            fold = Work(elements=(ROUNDING + 7) * weights, calls=40 * len(names))
            parts.append((fold + self._compared(names) * samples) * tried)
        return total(parts)

    def _smooth_k(self, tried: int, most: int) -> Work:
        cache = Work(elements=2 * FAKE * self._tokens * self.block.cached, calls=20)
        return (self._run() + (self._compared() + cache) * tried) * self._samples(most)

    def _clip(self, tried: int, most: int) -> Work:
        inputs = self.block.inputs(self.block.targets).values()
        runs = [self._compared(names) * tried for names in inputs]
        return self._search("absmax") + (self._run() + total(runs)) * self._samples(most)

    def _search(self, search: ScaleSearch) -> Work:
        """Scales of all weights, and rounding (`ptq.methods.rounding`)."""
        spec, parts = self.recipe.scheme.weights, []
        for rows, columns in self.block.quantized:
            elements, size = rows * columns, (spec and spec.group_size) or columns
            parts.append(Work(elements=ROUNDING * elements, calls=20))
            if search == "absmax":
                continue
            each = Work(elements=16 * elements, calls=25)
            if search == "output_mse":
                each += Work(products=2 * elements * size, calls=4 * columns / size)
            parts.append(each * len(FACTORS))
        return total(parts)

    def _gptq(self, spec: GPTQSpec) -> Work:
        """Factors of the Hessians, and the columns one by one (`ptq.methods.gptq`)."""
        parts = [self._search(spec.scale)]
        for names in self.block.inputs(self.block.targets).values():
            k = self.block.width(names)
            parts.append(Work(products64=4 / 3 * k**3, elements=16 * k * k, calls=30))
            modules: dict[str, int] = {}
            for name in names:
                module = name.rpartition(".")[0]
                modules[module] = modules.get(module, 0) + self.block.layers[name][0]
            for rows in modules.values():
                passes = 14 + spec.block_size / 2  # a column, and those of its block behind it
                columns = Work(products=rows * k * k, elements=passes * rows * k, calls=16 * k)
                errors = Work(products64=4 * rows * k * k, elements=20 * rows * k + 4 * k * k)
                sweep = Work(products=2 * rows * k * k) + columns  # G before it, too
                parts.append(columns + errors + sweep * spec.sweeps)
        return total(parts)

    def _refine(self, spec: RefineSpec) -> Work:
        """Targets, two errors over all samples, and the steps (`ptq.methods.refine`)."""
        samples = self.recipe.dataset.calibration.samples
        weights = sum(map(math.prod, self.block.quantized))
        step = Work(elements=50 * weights, calls=80 * len(self.block.targets))
        step += self._compared(self.block.targets) * (3 * self._samples(spec.batch))
        return self._compared(self.block.targets) * (3 * samples) + step * spec.iterations

    def _measure(self) -> Work:
        """Each quantized layer beside the float one (`pipeline.measure`), and rounding."""
        block, tokens = self.block, self._tokens
        weights = sum(rows * columns for rows, columns in block.quantized)
        once = Work(elements=(ROUNDING + 4 + MEASURED) * weights, calls=30 * len(block.targets))
        if self._told_by_moments:
            products = sum(2 * rows * columns * columns for rows, columns in block.quantized)
            return once + Work(products=products, products64=products, elements=8 * weights)
        passes = FAKE if self.recipe.scheme.activations is not None else 0
        products = sum(4 * tokens * rows * columns for rows, columns in block.quantized)
        compared = sum(
            MEASURED * (rows + columns) + passes * columns for rows, columns in block.quantized
        )
        each = Work(products=products, elements=tokens * compared, calls=40 * len(block.targets))
        if not block.targets:
            return Work()
        return once + (self._run(observed=True) + each) * self._samples(SAMPLES)

    @property
    def _told_by_moments(self) -> bool:
        """Whether second moments are at hand that tell what weights alone lose."""
        full = any(
            method.moments == "full"
            for method in [method for _, method in block_methods(self.recipe.methods)]
        )
        return self.recipe.scheme.activations is None and (full or self.recipe.statistics.hessians)

    def _cache(self) -> Work:
        """Static scales of K and V, and what they lose (`ptq.pipeline.measure.cache_ratios`)."""
        spec = self.recipe.scheme.kv_cache
        if spec is None or spec.dynamic:
            return Work()
        passes = Work(elements=2 * (FAKE + MEASURED) * self._tokens * self.block.cached, calls=100)
        return (self._run() + passes) * self._samples(SAMPLES)


def predict_seconds(work: Mapping[str, Work], speed: Work) -> dict[str, float]:
    """Wall time by phase, and in `total`."""
    seconds = {phase: part.seconds(speed) for phase, part in work.items()}
    return seconds | {"total": sum(seconds.values())}
