"""What rounding the layer that gives logits would cost: measured, as it is no part of a block.

Some calibration samples run through the float model and through one whose head is rounded to the
nearest. A head that is the embedding, too (tied), changes what every block reads: then all of them
run again. The mean KL divergence between the two is the cost, in the same nats as those of layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from calibrate.stream import BlockStream
from formats.modeling.layers import head_name
from formats.scheme import LayerScheme
from formats.stored.weights import storage_format
from kernels.numerics import dequantize
from ptq.methods.common.float_model import FloatModel, FloatModelView, config_of
from ptq.methods.common.rounding import round_weight
from ptq.plan.modules import head_weight
from ptq.plan.preflight import weight_bytes
from ptq.search.costs import FLOAT, Cost, GroupCosts

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
        device: Where they run.
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
