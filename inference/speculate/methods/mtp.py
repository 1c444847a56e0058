"""Drafts of a model's own layer for multi-token prediction (MTP).

DeepSeek-V3 (arXiv 2412.19437, section 2.2) and models that took it over have a decoder block after
their last one, and around it (`formats.families.predicting` has the names, MiMo's order and h)

    x_t = joined [embedded_norm(e_{t+1}), hidden_norm(h_t)]   h: the model's output after its norm
    y_t = block(x_t)                                          over all the positions up to t
    logits of token t + 2 = head(norm(y_t))

Where h_t is not there yet, y_{t-1} stands for it. Where a file lacks the embedding or the head,
they are the model's. A checkpoint that was quantized here has the layer as it was. Of several such
layers, each trained for a token further on, the first drafts all, from its own y.
"""

from __future__ import annotations

import logging
from math import prod
from typing import TYPE_CHECKING, Any

from formats.errors import CheckpointError, EngineError
from formats.families.predicting import Predicting
from formats.namespace import later
from inference.proposers import DraftMethod

if TYPE_CHECKING:
    from torch import Tensor

    from formats.checkpoint.read import Checkpoint
    from inference.models.decoder import Decoder
    from inference.speculate.chain import NetworkBackend, Target
    from inference.speculate.head import HeadProposer
    from kernels.attention_inputs import KVPool
with later():
    import torch

    from formats import residual_rotation
    from formats.checkpoint import read
    from inference.models import parts as loading
    from inference.speculate import head as heads

log = logging.getLogger("ptq.inference")


class PredictingLayer:
    """A loaded layer; see `inference.speculate.head.Head`.

    Args:
        checkpoint: Where it is stored.
        target: The model whose blocks it follows.
        backend: Where that runs.
        longest: Most positions.

    Attributes:
        shape: The model's.
        taps: The output of the model's last block.

    Raises:
        CheckpointError: a tensor is missing or damaged.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        target: Decoder[Any, Any],
        backend: NetworkBackend,
        longest: int,
    ) -> None:
        self.shape, self.taps = target.config, (target.config.layers,)
        self._target, self._backend, self._names = target, backend, _names(target)
        name, own = layer_name(target), self._names
        parts = loading.PartLoader(checkpoint, self.shape, backend)
        turn = self.shape.rotary[-1].table(longest, self.shape.head_dim, backend.device)
        self._layer = parts.layer(name, *turn)
        self._joined = parts.linear(f"{name}.{own.joined}")
        norms = (own.embedded_norm, own.hidden_norm, own.norm)
        self._embedded_norm, self._hidden_norm, self._norm = (
            parts.vector(f"{name}.{norm}") for norm in norms
        )
        head, table = f"{name}.{own.head}", f"{name}.{own.embedding}.weight"
        self._head = parts.linear(head) if _holds(checkpoint, head) else target.head
        embedding = parts.finite(table) if table in checkpoint else None
        self._embedding = None if embedding is None else embedding.to(backend.device, backend.dtype)

    def features(self, hidden: Tensor) -> Tensor:
        """[T, 1, H] to [T, H]: the model's output, after its last norm where the layer reads so."""
        last = hidden[:, 0].contiguous()
        if not self._names.reads_normed:
            return last
        return self._backend.rms_norm(last, self._target.norm, self.shape.eps)

    def run(self, batch: Any, features: Tensor, pool: KVPool) -> Tensor:
        """y [T, H]; K and V of the tokens go into the cache."""
        ids, table, norm, eps = batch.ids, self._embedding, self._backend.rms_norm, self.shape.eps
        embedded = self._target.embed(ids) if table is None else table[ids]
        halves = [norm(embedded, self._embedded_norm, eps), norm(features, self._hidden_norm, eps)]
        x = self._joined(torch.cat(halves[:: -1 if self._names.hidden_first else 1], dim=-1))
        before = self._layer.before_attention
        read = x if before is None else norm(x, before, eps)
        window = self.shape.windows[-1]
        return self._backend.run_block(self.shape, self._layer, read, x, batch, pool, window)

    def logits(self, y: Tensor) -> Tensor:
        """fp32 [T, vocabulary] of [T, H]."""
        return self._head(self._backend.rms_norm(y, self._norm, self.shape.eps)).float()


def layer_name(target: Decoder[Any, Any]) -> str:
    """The full name of the first layer that predicts further tokens."""
    return _names(target).layer(target.config.layers)


def _names(target: Decoder[Any, Any]) -> Predicting:
    """Where the layer is; of families that have none, where it would be."""
    return target.config.family.predicting or Predicting()


def _holds(checkpoint: Checkpoint, module: str) -> bool:
    """Whether a linear layer is there, quantized or not."""
    return f"{module}.weight" in checkpoint or module in checkpoint.quantized_modules


def mtp_proposer(name: str | None, target: Target) -> HeadProposer:
    """A proposer that runs the layer of a model that predicts further tokens.

    Args:
        name: The checkpoint with that layer, a folder or `organization/model` on the Hugging Face
            hub; None for the model's own.
        target: The model.

    Raises:
        CheckpointError: the layer is damaged.
        EngineError: there is none, it is another model's, the model is rotated, transformers' code
            runs it, or memory is too small.
    """
    model, backend = heads.declared(target)
    checkpoint = read.Checkpoint.open(name) if name else target.checkpoint
    layer, predicts = layer_name(model), model.config.family.predicting is not None
    joined, seeds = f"{layer}.{_names(model).joined}", residual_rotation.rotation_seeds
    rotated = [own.path for own in (target.checkpoint, checkpoint) if seeds(own.config)]
    if predicts and rotated:
        raise EngineError(
            f"speculate: the residual stream of {rotated[0]} is rotated, and the layer for further "
            "tokens knows it as it was. Take ngram, suffix, draft=PATH or eagle=PATH, or a recipe "
            "without the method rotation, or with its residual: false"
        )
    if not predicts or not _holds(checkpoint, joined):
        raise EngineError(
            f"speculate: {checkpoint.path} has no layer that predicts further tokens ({joined}). "
            "Models of DeepSeek-V3's, GLM-4.5's and MiMo's build are published with one; of a "
            "quantized checkpoint that lost it, give mtp=PATH with the folder of the original, or "
            "take ngram, suffix, draft=PATH or eagle=PATH"
        )
    unused = [own for own in checkpoint.predicting_layers if own != layer]
    if unused:
        log.warning(
            "speculate: %s drafts every token; %s of the same checkpoint draft none",
            layer,
            ", ".join(unused),
        )
    found, hidden = checkpoint.weight_shape(joined), model.config.hidden_size
    if found != (hidden, 2 * hidden):
        raise CheckpointError(
            f"{checkpoint.path}: {joined}.weight is {list(found)}, and the model needs "
            f"[{hidden}, {2 * hidden}]. It is another model's, or damaged"
        )
    own = [n for n in checkpoint.names() if n.startswith(f"{layer}.")]
    heads.require_room(
        "its layer for further tokens", _bytes(checkpoint, own), target, model.config
    )
    longest = heads.longest_of(target, model.config)
    return heads.HeadProposer(PredictingLayer(checkpoint, model, backend, longest), target)


def _bytes(checkpoint: Checkpoint, names: list[str]) -> int:
    return sum(prod(checkpoint.shape(n)) * checkpoint.dtype(n).itemsize for n in names)


METHOD = DraftMethod("mtp", mtp_proposer, takes_path=True, network=True)
