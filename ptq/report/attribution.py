"""Where the loss comes from: KL divergence with one part of the model quantized at a time.

A part is a kind of linear layer in all blocks, the cache, a block with all of these, or the head
(and the embedding, where a quantized head is both). It is taken
from the quantized model as it stands, kernels, activation scales and all; everything else is that
of the unrounded model, which is the original in the checkpoint's
own terms: where smoothing or rotation has moved factors between layers, its weights have been moved
likewise and have not been rounded. Engines for the parts are put together from the loaded blocks of
the two; nothing is loaded again.

`UnroundedCheckpoint` is that model where methods moved factors: smoothing divides a norm or a layer
and multiplies what reads it, rotation turns the residual stream, and a quantized layer fits only
among others that were treated likewise. It puts together what the checkpoint holds in float (norms,
biases, embedding, head) and the weights that its quantized layers had before they were rounded,
from what the run found and kept (`ptq.pipeline.artifact`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from calibrate.stream import BlockStream
from formats.checkpoint.read import Checkpoint
from formats.command import bar
from formats.families.block_layers import block_of, role_of
from formats.modeling.layers import attention_of_blocks, head_name
from formats.scheme import LayerScheme, Strict
from inference.accuracy import compare_predictions
from inference.engine import Engine
from inference.models.decoder import Decoder
from inference.models.layers import FeedForward, MixtureOfExperts
from inference.models.parts import Layer
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


MOST_GROUPS = 12  # of blocks, each of which is a run
AnyLayer = Layer[Any, Any]


class Part(Strict):
    """A part of the model, and the mean KL divergence in nats with it alone quantized."""

    name: str
    kl: float


class Attribution(Strict):
    """Where the loss comes from.

    Attributes:
        sequences: Evaluation sequences that each part was measured on.
        tokens: Predictions in them.
        whole: Mean KL divergence with everything quantized, on these.
        unrounded: With nothing quantized: what moving factors between layers costs by itself.
        kinds: Kinds of linear layers, and the cache.
        blocks: Blocks, or groups of neighbours where there are many.
        float_cache: With everything quantized but the cache, as runtimes serve the checkpoint that
            do not know such a cache; None where the cache is not quantized.
    """

    sequences: int
    tokens: int
    whole: float
    unrounded: float
    kinds: tuple[Part, ...]
    blocks: tuple[Part, ...]
    float_cache: float | None = None


def references(original: Engine, sequences: Sequence[Tensor]) -> list[Tensor]:
    """The original's logits for each sequence [T]: fp32 [T - 1, vocabulary]."""
    return [original.score(ids)[:-1] for ids in sequences]


def attribute(
    unrounded: Engine,
    quantized: Engine,
    sequences: Sequence[Tensor],
    expected: Sequence[Tensor],
    *,
    progress: bool = True,
) -> Attribution:
    """Measure every part.

    Args:
        unrounded: The original in the checkpoint's terms, with a float cache.
        sequences: Token ids, int64 [T] each.
        expected: From `references`, of the same sequences.
    """
    whole, kinds, blocks = _runs(unrounded, quantized)
    tokens = sum(map(len, expected))
    sites = enumerate(attention_of_blocks(quantized.checkpoint.config))
    caching = [block for block, name in sites if name is not None]

    def loss(run: _Run) -> float:
        pools = [
            (quantized if block in run.cached else unrounded).pools[place]
            for place, block in enumerate(caching)
        ]
        engine = run.around.variant(run.layers, pools)
        total = sum(
            compare_predictions(logits, engine.score(ids)[:-1], ids[1:]).kl.sum().item()
            for ids, logits in zip(sequences, expected, strict=True)
        )
        shown.update()
        return total / tokens

    def parts(each: Mapping[str, _Run]) -> tuple[Part, ...]:
        return tuple(Part(name=name, kl=loss(run)) for name, run in each.items())

    count = len(whole) + len(kinds) + len(blocks)
    with bar(total=count, title="Attributing", unit="part", shown=progress) as shown:
        return Attribution(
            sequences=len(sequences),
            tokens=tokens,
            **{name: loss(run) for name, run in whole.items()},
            kinds=parts(kinds),
            blocks=parts(blocks),
        )


class _Run(NamedTuple):
    """A model with one part quantized.

    Attributes:
        cached: Indexes of the blocks whose cache is the quantized model's.
        around: Whose embedding and head it has.
    """

    layers: Sequence[AnyLayer]
    cached: range
    around: Engine


Runs = dict[str, _Run]


def _runs(unrounded: Engine, quantized: Engine) -> tuple[Runs, Runs, Runs]:
    """What is measured, by name: of all the model, of kinds of layers, and of groups of blocks."""
    floats, ours = unrounded.model.layers, quantized.model.layers
    has_head = head_name(quantized.checkpoint.config) in quantized.checkpoint.quantized_modules
    outer = quantized if has_head else unrounded  # whose head and embedding are run
    every, none = range(len(ours)), range(0)
    whole = {"whole": _Run(ours, every, outer), "unrounded": _Run(floats, none, unrounded)}
    if quantized.quantized_kv:
        whole["float_cache"] = _Run(ours, none, outer)
    kinds = {
        name: _Run([put(f, q) for f, q in zip(floats, ours, strict=True)], cached, unrounded)
        for name, put, cached in _kinds(quantized)
    }
    if has_head:
        kinds[_head(quantized.checkpoint)] = _Run(floats, none, quantized)
    blocks = {
        _group_name(group): _Run(
            [(ours if i in group else floats)[i] for i in every], group, unrounded
        )
        for group in _groups(len(ours))
    }
    return whole, kinds, blocks


def _groups(blocks: int) -> list[range]:
    """Neighbouring blocks, in at most `MOST_GROUPS` groups of nearly equal size."""
    size = -(-blocks // MOST_GROUPS)
    return [range(i, min(i + size, blocks)) for i in range(0, blocks, size)]


def _group_name(group: range) -> str:
    return f"block {group[0]}" if len(group) == 1 else f"blocks {group[0]} to {group[-1]}"


Put = Callable[[AnyLayer, AnyLayer], AnyLayer]


def _kinds(quantized: Engine) -> Iterator[tuple[str, Put, range]]:
    """Each kind of part: its name, how a float block gets it from a quantized one, its caches.

    Blocks of transformers' own code are exchanged as a whole: their layers are of no kinds here.
    """
    named = quantized.checkpoint.quantized_modules if isinstance(quantized.model, Decoder) else ()
    roles = set(map(role_of, named))
    takes: dict[tuple[str, ...], Put] = {
        ("q", "k", "v", "q_a", "kv_a"): lambda f, q: replace(f, qkv=q.qkv),
        ("q_b", "kv_b"): lambda f, q: replace(f, latent=q.latent),
        ("o",): lambda f, q: replace(f, o=q.o),
        ("gate", "up"): lambda f, q: _with(f, "gate_up", q),
        ("down",): lambda f, q: _with(f, "down", q),
    }
    for names, put in takes.items():
        if roles & set(names):
            yield "/".join(name for name in names if name in roles), put, range(0)
    if quantized.quantized_kv:
        yield "cache", lambda f, _: f, range(len(quantized.model.layers))


def _head(checkpoint: Checkpoint) -> str:
    """What the quantized head is called, with the embedding that it may be, too."""
    name = head_name(checkpoint.config)
    return f"{name} and embedding" if checkpoint.shares_head else name


def _with(layer: AnyLayer, part: str, source: AnyLayer) -> AnyLayer:
    """A block with a part of its feed-forward layer, of all experts, from another one."""

    def merged(own: FeedForward[Any, Any], other: FeedForward[Any, Any]) -> FeedForward[Any, Any]:
        changed: dict[str, Any] = {part: getattr(other, part)}
        if isinstance(own, MixtureOfExperts) and own.shared is not None:
            assert isinstance(other, MixtureOfExperts)
            assert other.shared is not None
            changed["shared"] = merged(own.shared, other.shared)
        return replace(own, **changed)

    return replace(layer, feed_forward=merged(layer.feed_forward, source.feed_forward))
