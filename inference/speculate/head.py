"""Drafts of a head: one decoder block after the model, which reads the model's hidden states.

Of every token that the model computes, the feature (what the head reads) is kept at the slot that
the token has in the model's cache; so a prompt whose beginning was found in the cache has its
features there, too. The head's own K and V of a token depend on the next one as well
(`CachedTokens`), and those that it made of its own output are made again from the model's hidden
states once these are there. Of requests that run at once and differ after a block that they share,
the last of its tokens has K and V of one of them: that changes what is drafted for the others a
little.

A head may be run by transformers' code of the blocks of its model. Qwen3-Next and Qwen3.5 have a
layer that predicts further tokens whose block is one of theirs with full attention:

    x_t = fc [pre_fc_norm_embedding(e_{t+1}), pre_fc_norm_hidden(h_t)]    h: what the head reads
    y_t = norm(block(x_t))
    logits of token t + 2 = head(y_t)

and y_t is the h_{t+1} of what the model has not computed. So the layer is a model of one block that
is given x in the place of its embedding, and whose last norm is the layer's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError, EngineError
from formats.families.predicting import Predicting
from inference.models.decoder import Decoder
from inference.models.kv_cache import CacheShape, LayerCache, change_blocks
from inference.models.model import Computed, KVHeads, ModelShape, Network
from inference.proposers import HiddenStates
from inference.scheduling.batch import Ints, RunningBatch
from inference.scheduling.blocks import BlockChanges
from inference.scheduling.work import Work
from inference.speculate.chain import (
    CachedTokens,
    ChainProposer,
    NetworkBackend,
    Target,
    network_backend,
    require_memory,
)
from inference.transformers_code.attention import running
from inference.transformers_code.linear import RoutedExperts
from inference.transformers_code.load import load_predicting
from inference.transformers_code.model import CodeModel, CodeShape
from kernels.op_inputs import KV_BLOCK, KVPool


class Head(Protocol):
    """A head on a device.

    Attributes:
        captured: Whether a GPU may capture its steps.
        taps: Blocks of the model whose inputs it reads ("auxiliary hidden states"), the number of
            blocks for the last output.
    """

    taps: tuple[int, ...]
    captured: bool

    @property
    def shape(self) -> ModelShape:
        """That of a model of its block."""
        ...

    def features(self, hidden: Tensor) -> Tensor:
        """[T, taps, size of the model] to [T, H]: what the block reads of each token."""
        ...

    def run(self, batch: Any, features: Tensor, pool: KVPool) -> Tensor:
        """Run the block; K and V of the tokens go into its cache.

        Args:
            batch: Positions t, as the device's steps have them; `ids` are those of tokens t + 1.
            features: [T, H] of tokens t, or what it gave itself for tokens t - 1.

        Returns:
            [T, H], of which `logits` are made, and which stands for the feature of tokens t + 1.
        """
        ...

    def logits(self, y: Tensor) -> Tensor:
        """fp32 [T, vocabulary of the model] of tokens t + 2, of what `run` gave [T, H]."""
        ...


def declared(target: Target) -> tuple[Decoder[Any, Any], NetworkBackend]:
    """The model that a head drafts for, and where it runs.

    Raises:
        EngineError: transformers' code runs it.
    """
    if not isinstance(target.model, Decoder):
        raise EngineError(
            "speculate: a head reads hidden states of the model, and transformers' code, which "
            "runs this one, gives none. Take ngram, suffix or draft=PATH"
        )
    return target.model, network_backend(target)


def holds(checkpoint: Checkpoint, module: str) -> bool:
    """Whether a linear layer is there, quantized or not."""
    return f"{module}.weight" in checkpoint or module in checkpoint.quantized_modules


def longest_of(target: Target, shape: ModelShape) -> int:
    """Most positions of a head."""
    assert target.sizes.max_model_len is not None
    return min(target.sizes.max_model_len, shape.max_positions)


def require_room(name: str, weights: int, target: Target, shape: ModelShape) -> None:
    """Refuse a head for which memory is too small, before it is loaded.

    Raises:
        EngineError: it is.
    """
    cache, own = _cache(target, shape), target.backend.dtype
    features = cache.blocks * KV_BLOCK * shape.hidden_size * own.itemsize
    require_memory(name, weights + features, cache, target.backend, own)


def _cache(target: Target, shape: ModelShape) -> CacheShape:
    assert target.sizes.kv_blocks is not None
    layers = [LayerCache(shape.cached[-1])]
    return CacheShape(target.sizes.kv_blocks, layers).fitted(target.backend)


class HeadNetwork(Network):
    """A head as what drafts; see `inference.models.model.Network`.

    Args:
        head: What runs.
        longest: Most tokens of a sequence in its cache.
    """

    shift = 1

    def __init__(self, head: Head, longest: int) -> None:
        self.captured = head.captured
        self._head, self.longest, self.size = head, longest, head.shape.hidden_size

    @torch.no_grad()
    @override
    def step(self, batch: Any, pools: Sequence[KVPool], hidden: Tensor | None) -> Computed:
        assert hidden is not None
        y = self._head.run(batch, hidden, pools[0])
        y = y if batch.rows is None else y[batch.rows]
        return Computed(self._head.logits(y), y)


class HeadProposer(ChainProposer):
    """A proposer that runs a head; see `inference.proposers.Proposer`.

    Args:
        head: What it runs.
        target: The model that it drafts for.

    Attributes:
        reads: Hidden states of the model that it reads.
    """

    def __init__(self, head: Head, target: Target) -> None:
        backend, sizes = network_backend(target), target.sizes
        assert sizes.max_model_len is not None
        cache, own = _cache(target, head.shape), head.shape.hidden_size
        self._spare = cache.blocks * KV_BLOCK  # where rows go that stand for no token
        self._features = torch.zeros(
            self._spare + 1, own, dtype=backend.dtype, device=backend.device
        )
        network = HeadNetwork(head, longest_of(target, head.shape))
        super().__init__(network, target, backend.cache(cache), self._features)
        self._head = head
        self.reads = HiddenStates(
            head.taps, target.model.config.hidden_size, backend.dtype, self._keep
        )
        self._known = CachedTokens(cache.blocks, sizes.max_batch_size, sizes.max_model_len)

    @torch.no_grad()
    def _keep(self, hidden: Tensor, slots: Tensor) -> None:
        """`HiddenStates.keep`: the features."""
        where = torch.where(slots < 0, self._spare, slots)
        self._features.index_copy_(0, where, self._head.features(hidden))

    def note_hidden(self, work: Work) -> None:
        """`Proposer.note_hidden`: features of these tokens are there."""
        self._known.count(work.batch, work.places)
        self._known.finish(work.batch, work.places, work.starts, work.starts + work.counts)

    def note_changes(self, changes: BlockChanges) -> None:
        """`Proposer.note_changes`: copies have what the copied blocks have."""
        change_blocks(self._pools, changes)
        if changes.copies:
            sources, targets = torch.tensor(changes.copies, device=self._features.device).T
            features = self._features[: self._spare].view(-1, KV_BLOCK, self._features.shape[1])
            features[targets] = features[sources]
            self._known.copy(changes.copies)
            self._held.copy(changes.copies)

    def _ready(self, batch: RunningBatch, places: Ints) -> Ints:
        known = batch.known[places]
        return np.flatnonzero((known > 1) & (self._known.count(batch, places) == known - 1))

    def _kept(self, known: Ints, drafts: Ints) -> Ints:
        return known - self._shift


FULL = "full_attention"  # what configurations call it


class CodePredictor:
    """A loaded layer; see `Head`.

    Args:
        config: config.json of the model whose blocks it follows.
        target: That model, loaded.
        backend: Where that runs.
        longest: Most positions.

    Attributes:
        config: Of a model of one such block, as is `shape`.
        taps: The output of the model's last block.
        captured: Whether a GPU may capture its steps: experts ask the host for their tokens.

    Raises:
        CheckpointError: a tensor is missing or of another shape.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: Mapping[str, Any],
        names: Predicting,
        target: CodeModel,
        backend: NetworkBackend,
        longest: int,
    ) -> None:
        self.config = self.shape = one_block(target.config)
        self.dtype, self.taps = target.dtype, (len(target.layers),)
        self._sinks, self._backend = target.sink_tokens, backend
        values = {**config, "num_hidden_layers": 1, "layer_types": [FULL]}
        self._model: Any = load_predicting(
            checkpoint, values, self.config.structure, names, target.module, backend, longest
        )
        self.captured = not any(isinstance(part, RoutedExperts) for part in self._model.modules())
        around = self._model.get_submodule(names.module)
        self._joined = around.get_submodule(names.joined)
        self._embedded_norm = around.get_submodule(names.embedded_norm)
        self._hidden_norm = around.get_submodule(names.hidden_norm)

    def features(self, hidden: Tensor) -> Tensor:
        """[T, 1, H] to [T, H]: what the model's head reads."""
        return hidden[:, 0]

    @torch.no_grad()
    def run(self, batch: Any, features: Tensor, pool: KVPool) -> Tensor:
        """y [T, H]; K and V of the tokens go into the cache."""
        step = self._backend.code_step(self, [pool], batch)
        with running(step, len(self.config.places), self._sinks):
            embedded = self._embedded_norm(self._model.get_input_embeddings()(step.ids[None]))
            hidden = self._hidden_norm(features[None].to(self.dtype))
            x = self._joined(torch.cat([embedded, hidden], dim=-1))
            out = self._model.base_model(
                inputs_embeds=x, use_cache=False, position_ids=step.positions[None]
            )
        return out.last_hidden_state[0]

    def logits(self, y: Tensor) -> Tensor:
        """fp32 [T, vocabulary] of [T, H]."""
        return self._model.get_output_embeddings().layer(y).float()


def one_block(shape: CodeShape) -> CodeShape:
    """The shape of a model whose only block is as the last one with full attention of another.

    Raises:
        CheckpointError: the other has none.
    """
    for block in reversed(shape.structure.blocks):
        site = block.cache
        if site is not None and site.window is None and not block.mixers:
            cached = KVHeads(site.kv_heads, site.key_size, site.value_size)
            structure = replace(shape.structure, blocks=(block,))
            return replace(
                shape, structure=structure, windows=(None,), places=(0,), cached=(cached,)
            )
    raise CheckpointError(
        "config.json: no block of the model has full attention and no state beside it, as the "
        "layer that predicts further tokens does"
    )
