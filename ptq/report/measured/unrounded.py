"""The original model in the terms of a quantized checkpoint: as it was before it was rounded.

Smoothing divides a norm or a layer and multiplies what reads it; rotation turns the residual
stream. A quantized layer fits only among others that were treated likewise. This puts together what
the checkpoint holds in float (norms, biases, embedding, head) and the weights that its quantized
layers had before they were rounded, from what the run found and kept (`ptq.pipeline.found`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from calibrate.stream import BlockStream
from formats.checkpoint.read import Checkpoint
from formats.families.names import block_of
from formats.scheme import LayerScheme
from ptq.methods.common.float_model import config_of
from ptq.methods.registry import block_methods, view_of
from ptq.pipeline.artifact import Artifact
from ptq.pipeline.passes import block_work
from ptq.plan.modules import head_weight
from ptq.plan.plan import Plan


def is_the_original(plan: Plan) -> bool:
    """Whether a run's methods leave every weight where it was, but for its rounding."""
    methods = block_methods(plan.recipe.methods)
    views = len(methods) < len(plan.recipe.methods)
    return not views and not any(method.folds for _, method in methods)


class UnroundedWeights:
    """The weights of a run's layers before they were rounded; those of one block are held.

    Raises:
        CheckpointError: the run did not keep what it found.
    """

    def __init__(self, plan: Plan, output: Path) -> None:
        self._plan, self._artifact = plan, Artifact.load(output)
        self._model = view_of(Checkpoint.open(plan.recipe.model.folder), plan.recipe.methods)
        self._stream = BlockStream(config_of(self._model), self._model.tensor)
        self._block, self._weights = "", dict[str, Tensor]()

    def __call__(self, module: str) -> Tensor:
        """A layer's weight, all of whose block is treated as the run treated it: fp32 [out, in]."""
        if module == self._plan.head:
            return self._model.tensor(head_weight(self._model)).float()
        block = block_of(module)
        assert block is not None
        if block != self._block:
            index = self._stream.blocks.index(block)
            work = block_work(self._plan, self._model, self._stream.load(index))
            self._artifact.fold(work, self._plan.recipe)
            self._block = block
            self._weights = {name: part.weight for name, part in work.block.linears.items()}
        return self._weights[module]


class UnroundedCheckpoint(Checkpoint):
    """A quantized checkpoint whose linear layers have the weights that were rounded.

    Make one with `of_run`.
    """

    _weights: UnroundedWeights
    _unrounded: Mapping[str, str] = {}  # modules by the names of their weights
    _shapes: Mapping[str, tuple[int, ...]] = {}

    @classmethod
    def of_run(cls, path: Path, plan: Plan) -> UnroundedCheckpoint:
        """Open a run's checkpoint, and what the run kept.

        Raises:
            CheckpointError: the run did not keep what it found, or the checkpoint is damaged.
        """
        own = cls.open(path)
        own._weights = UnroundedWeights(plan, path.parent)
        own._shapes = {name: own.weight_shape(name) for name in own.quantized_modules}
        own._unrounded = {f"{name}.weight": name for name in own.quantized_modules}
        if plan.head is not None and plan.shared is not None:
            own._unrounded = {**own._unrounded, plan.shared: plan.head}
        own.quantized_modules = ()
        return own

    def __contains__(self, name: str) -> bool:
        return name in self._unrounded or super().__contains__(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        module = self._unrounded.get(name)
        return super().shape(name) if module is None else self._shapes[module]

    def tensor(self, name: str) -> Tensor:
        """A tensor as the checkpoint has it; of a quantized layer its weight, fp32 [out, in]."""
        module = self._unrounded.get(name)
        return super().tensor(name) if module is None else self._weights(module)

    def tensors(self, names: Sequence[str]) -> Tensor:
        """Tensors below each other."""
        if not self._unrounded.keys() & set(names):
            return super().tensors(names)
        return torch.cat([self.tensor(name) for name in names])

    def weight_shape(self, module: str) -> tuple[int, ...]:
        """Outputs and inputs of a linear layer."""
        return self._shapes.get(module) or super().weight_shape(module)

    def scheme_of(self, module: str) -> LayerScheme:
        """Of a layer that has its unrounded weight, that nothing is quantized."""
        return LayerScheme() if module in self._shapes else super().scheme_of(module)
