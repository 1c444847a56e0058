"""What a budget chooses from: for each group of layers, what each candidate takes and costs.

Layers that are multiplied as one are a group, and share a scheme. Its candidates are those that the
target multiplies fast, bits apart:

| inputs | `cpu`, `gpu`                                | `vllm`                         |
|--------|---------------------------------------------|--------------------------------|
| float  | int4 in groups of 128, 64 or 32; int8       | the same                       |
| int8   | int4 in groups, inputs int8 by token; int8  | int4 in groups, inputs float;  |
|        | weights, inputs as the recipe's scheme says | int8 as the scheme says        |
| fp8    | not `cpu`: int4 in groups, inputs float;    | the same                       |
|        | fp8 as the scheme says                      |                                |

Where no such groups divide a layer's inputs, int4 has one scale for each output channel.

Each has a kernel of its own there (`kernels.triton.linear.dispatch`; vLLM's Marlin and CUTLASS
kernels of compressed-tensors), so that layers of several schemes stand side by side at full
speed. What a kernel would compute as floats is no candidate.

`costs.json` keeps that beside the statistics that it was counted from, so that another budget is
solved without the model.

The layer that gives logits is no part of a block, and what rounding it would cost is measured. Some
calibration samples run through the float model and through one whose head is rounded to the
nearest. A head that is the embedding, too (tied), changes what every block reads: then all of them
run again. The mean KL divergence between the two is the cost, in the same nats as those of layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from pydantic import ValidationError
from torch import Tensor

from calibrate.stream import BlockStream
from formats.documents import Strict
from formats.errors import CheckpointError, RecipeError
from formats.families.block_layers import expert_of
from formats.files import replace_file
from formats.modeling.layers import head_name
from formats.scheme import BLOCK, PRESETS, LayerScheme, Scheme, WeightSpec
from formats.stored.weights import storage_format
from kernels.numerics import dequantize
from ptq.methods.common.float_model import FloatModel, FloatModelView, config_of
from ptq.methods.common.rounding import round_weight
from ptq.methods.costs import INPUTS, WEIGHTS, CostsSpec
from ptq.output import COSTS_FILE
from ptq.pipeline.artifact import Found
from ptq.plan.modules import ModulePlan, head_weight
from ptq.plan.plan import Plan
from ptq.plan.preflight import header_bytes, predict_checkpoint, weight_bytes
from ptq.recipe.budget import Target

SCHEMES = {
    "float": LayerScheme(),
    "w8": PRESETS["w8"].of_layers,
    "w4_g32": LayerScheme(weights=WeightSpec(dtype="int4", granularity="group", group_size=32)),
}  # of a head
FLOAT = "float"  # the name of a group's candidate that leaves it as it is
HEAD_SCHEMES = {name: scheme for name, scheme in SCHEMES.items() if name != FLOAT}
GROUPS = (BLOCK, 64, 32)  # sizes that int4 candidates have


def candidates(scheme: LayerScheme, target: Target) -> dict[str, LayerScheme]:
    """Schemes by their short names, such as `w4_g64`; the fewest bits first.

    Args:
        scheme: Of the recipe: it says what inputs are.
        target: Where the model is to run.

    Raises:
        RecipeError: the target does not multiply such inputs.
    """
    if scheme.activations is not None and scheme.activations.dtype != "int8" and target == "cpu":
        raise RecipeError(
            "budget.target: found cpu, which multiplies no fp8 inputs; use the target gpu or vllm, "
            "or a scheme with float or int8 inputs, such as w4 or a8w4"
        )
    return {Scheme(**dict(one)).wac: one for one in _candidates(scheme, target)}


def _candidates(scheme: LayerScheme, target: Target) -> Iterator[LayerScheme]:
    inputs, weights = scheme.activations, scheme.weights
    integer = inputs is not None and inputs.dtype == "int8" and target != "vllm"
    token = PRESETS["a8w4"].activations if integer else None
    two_level = token is not None and weights is not None and weights.two_level
    for size in GROUPS:
        spec = WeightSpec(dtype="int4", granularity="group", group_size=size, two_level=two_level)
        yield LayerScheme(weights=spec, activations=token)
    yield LayerScheme(weights=WeightSpec(dtype="int4"), activations=token)
    if inputs is None or weights is None:
        yield LayerScheme(weights=WeightSpec())
    elif weights.bits == 8:
        yield scheme if not isinstance(scheme, Scheme) else scheme.of_layers
    else:
        yield LayerScheme(weights=WeightSpec(), activations=inputs)


def groups_of(plan: Plan) -> dict[str, list[ModulePlan]]:
    """The layers that are quantized, in groups, in the model's order.

    Layers that are merged at run time are one group, and so are all experts of a block, whose
    products run together.

    Returns:
        Layers by the full name of what they become, such as `model.layers.0.self_attn.qkv_proj`.
    """
    found: dict[str, list[ModulePlan]] = {}
    for module in plan.modules:
        if module.action == "quantize" and module.name not in plan.predicting:
            found.setdefault(_label(module), []).append(module)
    return found


def _label(module: ModulePlan) -> str:
    if expert_of(module.name) is not None:
        return f"{module.name.partition('.experts.')[0]}.experts"
    return module.fused_group or module.name


class Cost(Strict):
    """One candidate of a group.

    Attributes:
        scheme: Its short name.
        nbytes: That the group's layers take in it.
        weights: Nats a token that rounding their weights costs, as predicted.
        inputs: The same of their inputs; 0 where they stay in float.
    """

    scheme: str
    nbytes: int
    weights: float
    inputs: float

    @property
    def kl(self) -> float:
        """Both."""
        return self.weights + self.inputs


class GroupCosts(Strict):
    """A group of layers with its candidates.

    Attributes:
        elements: Weights in it.
        candidates: The fewest bits first.
    """

    label: str
    layers: tuple[str, ...]
    elements: int
    candidates: tuple[Cost, ...]

    def either(self, *schemes: str) -> Cost | None:
        """The candidate with the first of some names that it has; None if it has none of them."""
        by_name = {cost.scheme: cost for cost in self.candidates}
        return next((by_name[name] for name in schemes if name in by_name), None)


class Costs(Strict):
    """Everything that a budget chooses from.

    Attributes:
        key: Of the run that it was counted in; another run's costs are not taken.
        rounding: The method that rounded weights.
        schemes: Candidates by their short names.
        fixed_bytes: Of the weight files, without the groups: what stays as it is, and headers.
        head: Full name of the head, if it is one of them.
    """

    key: str
    rounding: str
    schemes: dict[str, LayerScheme]
    fixed_bytes: int
    groups: tuple[GroupCosts, ...]
    head: str | None = None

    @property
    def elements(self) -> int:
        """Weights in all groups of blocks."""
        return sum(group.elements for group in self.groups if group.label != self.head)

    @property
    def head_in_float(self) -> Costs:
        """The same with no other choice for the head."""
        groups = tuple(
            group.model_copy(update={"candidates": group.candidates[:1]})
            if group.label == self.head
            else group
            for group in self.groups
        )
        return self.model_copy(update={"groups": groups})

    @property
    def options(self) -> list[list[tuple[int, float]]]:
        """Bytes and nats of each group's candidates."""
        return [[(cost.nbytes, cost.kl) for cost in group.candidates] for group in self.groups]

    def predicted(self, schemes: Sequence[str]) -> float:
        """Nats that a choice of a scheme for each group costs."""
        chosen = zip(self.groups, schemes, strict=True)
        found = [group.either(name) for group, name in chosen]
        return math.fsum(cost.kl for cost in found if cost is not None)

    def uniform(self, scheme: str) -> tuple[int, float] | None:
        """Bytes of the weight files and predicted cost where all groups have one scheme.

        None where some cannot have it. What may stay in float does.
        """
        of = [group.either(FLOAT, scheme) for group in self.groups]
        found = [cost for cost in of if cost is not None]
        if len(found) < len(of):
            return None
        nbytes = self.fixed_bytes + sum(cost.nbytes for cost in found)
        return nbytes, math.fsum(cost.kl for cost in found)

    def save(self, folder: Path) -> None:
        """Write the file; it is replaced at once or not at all."""
        replace_file(folder / COSTS_FILE, (self.model_dump_json(indent=1) + "\n").encode())

    @classmethod
    def load(cls, folder: Path) -> Costs:
        """Read it.

        Raises:
            CheckpointError: it is missing or damaged.
        """
        path = folder / COSTS_FILE
        try:
            return cls.model_validate_json(path.read_bytes())
        except (OSError, ValidationError) as error:
            raise CheckpointError(
                f"{path}: not readable as costs of a budget ({error}). Run the recipe again"
            ) from error


def gather(
    plan: Plan,
    spec: CostsSpec,
    found: Found,
    model: FloatModel,
    names: list[str],
    key: str,
    head: GroupCosts | None = None,
) -> Costs:
    """Costs by group of what a run has counted layer by layer."""
    counted = {name.split("/", 2)[2]: tensor for name, tensor in found.tensors.items()}
    of_blocks = {label: own for label, own in groups_of(plan).items() if label != plan.head}
    groups = tuple(_group(*group, spec, names, counted, model) for group in of_blocks.items())
    quantized = {module.name for layers in of_blocks.values() for module in layers}
    caches = [plan.recipe.cache_of(block) for block in plan.blocks]
    alone = sum(
        math.prod(model.shape(f"{name}.weight")) * model.dtype(f"{name}.weight").itemsize
        for name in quantized
    )
    alone += 0 if head is None else head.candidates[0].nbytes
    heads = {} if head is None else {c.scheme: SCHEMES[c.scheme] for c in head.candidates}
    fitting = {cost.scheme for group in groups for cost in group.candidates}
    rounded = [*quantized, *([] if head is None else [head.label])]
    more = [f"{name}.weight_packed" for name in rounded for _ in range(2)]  # scales and shape
    return Costs(
        key=key,
        rounding=spec.rounding,
        schemes=heads
        | {name: s for name, s in zip(names, spec.schemes, strict=True) if name in fitting},
        fixed_bytes=predict_checkpoint(model, {}, caches) - alone + header_bytes(more),
        head=None if head is None else head.label,
        groups=groups if head is None else (*groups, head),
    )


def _group(
    label: str,
    modules: Sequence[ModulePlan],
    spec: CostsSpec,
    names: list[str],
    counted: Mapping[str, Tensor],
    model: FloatModel,
) -> GroupCosts:
    none = torch.zeros(len(names), dtype=torch.float64)
    layers = [module.name for module in modules]
    weights, inputs = (
        sum((counted.get(f"{kind}/{name}", none) for name in layers), none)
        for kind in (WEIGHTS, INPUTS)
    )
    candidates = [
        Cost(
            scheme=name,
            nbytes=sum(
                weight_bytes(scheme, module.shape, model.dtype(f"{module.name}.weight"))
                for module in modules
            ),
            weights=weights[i].item(),
            inputs=inputs[i].item(),
        )
        for i, (name, scheme) in enumerate(zip(names, spec.schemes, strict=True))
        if not bool(weights[i].isnan())
    ]
    return GroupCosts(
        label=label,
        layers=tuple(layers),
        elements=sum(math.prod(module.shape) for module in modules),
        candidates=tuple(candidates),
    )


SAMPLES = 8  # calibration sequences that are compared
ROWS = 256  # tokens whose logits are compared at once


class RoundedHead(FloatModelView):
    """A float model whose head holds what a scheme makes of it."""

    def __init__(self, source: FloatModel, scheme: LayerScheme) -> None:
        super().__init__(source)
        self._name, spec = head_weight(source), scheme.weights
        assert spec is not None
        weight, dtype = source.tensor(self._name), source.dtype(self._name)
        packed = storage_format(scheme) == "pack-quantized"
        stored = round_weight(weight.float(), spec, dtype if packed else torch.float32, "mse")
        values = dequantize(stored.q, stored.scale, stored.zero_point, spec.block)
        self._values = values.to(weight.dtype)

    def tensor(self, name: str) -> Tensor:
        """Read one tensor."""
        return self._values if name == self._name else self.source.tensor(name)


def head_costs(
    model: FloatModel,
    schemes: Mapping[str, LayerScheme],
    sequences: Sequence[Tensor],
    device: torch.device,
) -> GroupCosts:
    """The head as a group of its own, which may also stay in float.

    Args:
        model: In float.
        schemes: Those that its weight may be rounded to, by their short names.
        sequences: Token ids of the samples: int64 [tokens] each.
    """
    holds = head_weight(model)
    shape, dtype = (*model.shape(holds),), model.dtype(holds)
    samples = list(sequences[:SAMPLES])
    original = BlockStream(config_of(model), model.tensor, device=device)
    _run(original, samples)
    found = [Cost(scheme=FLOAT, nbytes=math.prod(shape) * dtype.itemsize, weights=0.0, inputs=0.0)]
    for name, scheme in schemes.items():
        rounded = BlockStream(config_of(model), RoundedHead(model, scheme).tensor, device=device)
        if holds == f"{head_name(model.config)}.weight":  # nothing but the head reads it
            rounded.start(samples)
            rounded.inputs[:] = original.inputs
        else:
            _run(rounded, samples)
        nbytes = weight_bytes(scheme, (shape[0], shape[1]), dtype)
        kl = divergence(original, rounded, samples)
        found.append(Cost(scheme=name, nbytes=nbytes, weights=kl, inputs=0.0))
    name = head_name(model.config)
    return GroupCosts(
        label=name, layers=(name,), elements=math.prod(shape), candidates=tuple(found)
    )


def _run(stream: BlockStream, samples: list[Tensor]) -> None:
    """Take samples through all blocks."""
    stream.start(samples)
    for index in range(len(stream.blocks)):
        stream.advance(stream.load(index))


def divergence(original: BlockStream, other: BlockStream, samples: Sequence[Tensor]) -> float:
    """Mean KL divergence of what two streams predict, which have run through all blocks."""
    total, tokens = 0.0, 0
    with torch.no_grad(), original.head() as first, other.head() as second:
        for ids, before, after in zip(samples, original.inputs, other.inputs, strict=True):
            p, q = first(ids, before.to(original.device)), second(ids, after.to(other.device))
            for one, two in zip(p.split(ROWS), q.split(ROWS), strict=True):
                log_p, log_q = one.double().log_softmax(-1), two.double().log_softmax(-1)
                total += (log_p.exp() * (log_p - log_q)).sum().item()
            tokens += len(ids)
    return max(total / tokens, 0.0)
