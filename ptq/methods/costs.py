"""Costs: what every layer would cost the model in each of some schemes, in nats of KL divergence.

With the Fisher factors A and G of a layer (`calibrate.gradients`), |g_t|^2 the weight of token t:

    weight W rounded to W - E          1/2 tr(E^T G E A)
    input x_t rounded to x_t - e_t     1/2 mean_t |g_t|^2 (W e_t)^T G (W e_t)
    K, V rounded, of each head h       1/2 mean_t |g_t,h|^2 e_t^T G_h e_t

Terms of different layers, inputs and caches add up: errors of rounding are independent, and of
second order in the model's KL there is nothing else but their products. What `rounding` would make
of the weights is an estimate where it rounds with feedback (`ptq.methods.common.with_feedback`
tells how near it comes), and solved for where it does not, or where factors do not invert.
Nothing is changed.

`ptq.search` puts this method into the run that a budget begins with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from formats.cache_scheme import CacheRole, KVCacheSpec
from formats.namespace import later
from formats.scheme import LayerScheme, WeightSpec
from ptq.methods.common.block import BlockWork
from ptq.methods.common.method import Method
from ptq.methods.common.spec import FLOAT, BlockSizes, MethodSpec, PlannedLayer, Stage

if TYPE_CHECKING:
    from torch import Tensor

    from ptq.methods.common.with_feedback import Feedback
with later():
    import torch

    from calibrate import gradients
    from ptq.methods import registry
    from ptq.methods.common import cache

WEIGHTS, INPUTS, CACHES = "weights", "inputs", "caches"  # what `found` names its tensors after
ROLES: tuple[CacheRole, ...] = ("k_cache", "v_cache")


class CostsSpec(MethodSpec):
    """Costs: estimates the loss of layers and caches in several schemes; it changes nothing.

    YAML: ``costs: {rounding: gptq, schemes: [{weights: {dtype: int8}}], caches: [{dtype: int8}]}``

    A budget adds it to its first run by itself.
    """

    stage: ClassVar = Stage.COUNT
    name: Literal["costs"] = "costs"
    rounding: str = "rtn"
    """The method that rounds weights."""
    options: dict[str, bool | int | float | str] = Field({})
    """Its options."""
    schemes: tuple[LayerScheme, ...] = ()
    """What a layer may be quantized to."""
    caches: tuple[KVCacheSpec, ...] = ()
    """How K and V may be cached."""
    samples: Annotated[int, Field(ge=1)] = 16
    """Calibration sequences on which errors of inputs and caches are measured."""

    def algorithm(self) -> Costs:
        """Counts costs of a block."""
        return Costs(self)

    def rounds(self) -> MethodSpec:
        """What `rounding` stands for."""
        given = {"name": self.rounding, **self.options}
        return registry.METHODS[self.rounding].model_validate(given, strict=False)

    def explain(self, layer: PlannedLayer) -> Iterator[str]:
        """In how many schemes."""
        yield f"costs: counted in {len(self.schemes)} schemes, rounded by {self.rounding}"

    def memory(self, block: BlockSizes) -> int:
        """What rounding holds, and the error of the largest weight with its products in fp64."""
        return self.rounds().memory(block) + 6 * FLOAT * block.largest


class Costs(Method):
    """Counts what each target of a block would cost; see the module's docstring."""

    needs = "samples"
    moments = "full"
    gradients = True

    def __init__(self, spec: CostsSpec) -> None:
        self.spec = spec
        self.costs: dict[str, Tensor] = {}

    def solve(self, work: BlockWork) -> None:
        """Round every target in every scheme, and run some samples for inputs and caches."""
        self.costs = dict(self._of_weights(work))
        rounded = any(scheme.activations is not None for scheme in self.spec.schemes)
        if rounded or self.spec.caches:
            self.costs |= RoundedSamples(work, self.spec).costs()

    def found(self) -> dict[str, Tensor]:
        """Nats a token, fp64, NaN of a scheme that does not fit the layer.

        `weights/<layer>` and `inputs/<layer>` are [schemes], `caches/<attention>` is [caches].
        """
        return self.costs

    def commit(self, work: BlockWork) -> None:
        """Nothing changes."""
        self.costs = {}

    def _of_weights(self, work: BlockWork) -> Iterator[tuple[str, Tensor]]:
        costs = {name: [float("nan")] * len(self.spec.schemes) for name in work.targets}
        rounding = self.spec.rounds()
        method = rounding.algorithm()
        assert method is not None, rounding.name
        feedback = dict(method.feedback(replace(work, events=[])))
        known: dict[str, dict[str, Tensor]] = {}
        for i, scheme in enumerate(self.spec.schemes):
            key = LayerScheme(weights=scheme.weights).model_dump_json()
            if key not in known:
                known[key] = rounding_costs(work, scheme, method, feedback)
            for name, cost in known[key].items():
                costs[name][i] = cost.item()
        for name, found in costs.items():
            yield f"{WEIGHTS}/{name}", torch.tensor(found, dtype=torch.float64)


def rounding_costs(
    work: BlockWork, scheme: LayerScheme, method: Method, feedback: Mapping[str, Feedback]
) -> dict[str, Tensor]:
    """Nats that each target's weight costs once it is rounded; only of those that a scheme fits.

    Args:
        feedback: Of the targets that need not be solved.
    """
    alone = scheme.weights_alone if scheme.activations is None else scheme
    fitting = tuple(name for name in work.targets if fits(alone, work.block.linears[name].weight))
    whole = replace(
        work,
        targets=fitting,
        schemes=dict.fromkeys(fitting, alone),
        quantized={},
        events=[],
        smoothing=[],
    )
    copied = replace(whole, targets=tuple(name for name in fitting if name not in feedback))
    method.solve(copied)
    method.commit(copied)
    solved = {
        name: work.fisher(name).kl(work.block.linears[name].weight - layer.dequantized())
        for name, layer in copied.quantized.items()
    }
    return solved | {
        name: feedback[name].kl(
            work.block.linears[name].weight, whole.weight_spec(name), whole.scale_dtype(name)
        )
        for name in fitting
        if name in feedback
    }


def fits(scheme: LayerScheme, weight: Tensor) -> bool:
    """Whether a weight [out, in] is cut into whole groups; int4 has channels where it cannot be."""
    spec, inputs = scheme.weights, weight.shape[1]
    if spec is None or spec.granularity == "group":
        return spec is None or inputs % spec.block[1] == 0
    grouped = WeightSpec(dtype=spec.dtype, granularity="group") if spec.dtype == "int4" else spec
    return grouped.fitted(inputs) == spec


class RoundedSamples:
    """What rounding costs that the samples show: of inputs, and of cached keys and values."""

    def __init__(self, work: BlockWork, spec: CostsSpec) -> None:
        self.work, self.spec = work, spec
        self.inputs = {s.activations: s for s in spec.schemes if s.activations is not None}
        self.tokens = 0
        self.sums: dict[str, list[float]] = {}

    def costs(self) -> dict[str, Tensor]:
        """Those of `Costs.found` but for the weights."""
        for sample in self.work.samples(self.spec.samples):
            self._run(sample)
        found: dict[str, Tensor] = {}
        for key, sums in self.sums.items():
            means = torch.tensor(sums, dtype=torch.float64) / self.tokens
            found[key] = self._by_scheme(means) if key.startswith(INPUTS) else means
        return found

    def _by_scheme(self, by_kind: Tensor) -> Tensor:
        at = {kind: i for i, kind in enumerate(self.inputs)}
        kinds = [scheme.activations for scheme in self.spec.schemes]
        return torch.stack([by_kind.new_zeros(()) if k is None else by_kind[at[k]] for k in kinds])

    def _run(self, sample: int) -> None:
        assert self.work.gradients is not None
        targets = set(self.work.targets) if self.inputs else set[str]()

        def on_input(name: str, x: Tensor) -> None:
            if name in targets:
                costs = [self._input(name, x, s, sample) for s in self.inputs.values()]
                self._add(f"{INPUTS}/{name}", costs)

        def on_kv(k: Tensor, v: Tensor) -> None:
            self.tokens += len(k)
            name = self.work.block.attention
            both = dict(zip(ROLES, (k, v), strict=True))
            costs = [
                sum(self._cached(role, x, spec, sample) for role, x in both.items())
                for spec in self.spec.caches
            ]
            self._add(f"{CACHES}/{name}", costs)

        self.work.block.run(sample, on_input=on_input, on_kv=on_kv)

    def _add(self, key: str, costs: list[float]) -> None:
        before = self.sums.get(key, [0.0] * len(costs))
        self.sums[key] = [a + b for a, b in zip(before, costs, strict=True)]

    def _input(self, name: str, x: Tensor, scheme: LayerScheme, sample: int) -> float:
        """1/2 sum_t |g_t|^2 (W e_t)^T G (W e_t) of one sample."""
        work, linear = self.work, self.work.block.linears[name]
        one = replace(work, schemes={name: scheme})
        error = x - one.seen_input(name, x, one.input_scale(name))
        assert work.gradients is not None
        weights = work.gradients.output(name).weights_of(sample, len(x))[-len(x) :].to(x.device)
        moved = (error @ linear.weight.T) * weights.sqrt()[:, None]
        identity = torch.eye(len(x), device=x.device)
        return gradients.FisherFactors(identity, work.fisher(name).outputs).kl(moved.T).item()

    def _cached(self, role: CacheRole, x: Tensor, spec: KVCacheSpec, sample: int) -> float:
        """1/2 sum_t,h |g_t,h|^2 e_t^T G_h e_t of one sample's K or V [tokens, heads, D]."""
        work, name = self.work, self.work.block.attended
        absmax = work.observed(name, role).channel_absmax
        error = (x - cache.through_cache(x, absmax, spec, role)).double()
        assert work.gradients is not None
        seen = work.gradients.of[name, role]
        g, weights = seen.outputs.double(), seen.weights_of(sample, len(x))[-len(x) :].double()
        spread = torch.einsum("thd,hde->the", error, g)
        return 0.5 * ((spread * error).sum(dim=2) * weights).sum().item()
