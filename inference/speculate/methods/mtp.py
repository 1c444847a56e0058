"""Drafts of a model's own layer for multi-token prediction (MTP).

DeepSeek-V3 (arXiv 2412.19437, section 2.2) and models that took it over have a decoder block after
their last one, and around it (`formats.families.predicting` has the names, MiMo's order and h)

    x_t = joined [embedded_norm(e_{t+1}), hidden_norm(h_t)]   h: the model's output after its norm
    y_t = block(x_t)                                          over all the positions up to t
    logits of token t + 2 = head(norm(y_t))

Where h_t is not there yet, y_{t-1} stands for it. Where a file lacks the embedding or the head,
they are the model's. A checkpoint that was quantized here has the layer, too. Of several such
layers, each trained for a token further on, the first drafts all, from its own y. Where
transformers' code runs the model, it runs the layer (`inference.speculate.head`).
"""

from __future__ import annotations

import logging
from math import prod
from typing import TYPE_CHECKING, Any, cast

from formats.errors import CheckpointError, EngineError
from formats.families.predicting import UNDECLARED, Predicting
from formats.families.registry import find_family
from formats.namespace import later
from inference.proposers import DraftMethod

if TYPE_CHECKING:
    from torch import Tensor

    from formats.checkpoint.read import Checkpoint
    from inference.models.decoder import Decoder
    from inference.speculate.chain import NetworkBackend, Target
    from inference.speculate.head import HeadProposer
    from inference.transformers_code.model import CodeModel
    from kernels.op_inputs import KVPool
with later():
    import torch

    from formats import residual_rotation
    from formats.checkpoint import read
    from inference.models import decoder
    from inference.models import parts as loading
    from inference.speculate import chain
    from inference.speculate import head as heads

log = logging.getLogger("ptq.inference")


class PredictingLayer:
    """A loaded layer; see `inference.speculate.head.Head`.

    Args:
        target: The model whose blocks it follows.
        backend: Where that runs.
        longest: Most positions.

    Attributes:
        taps: The output of the model's last block.

    Raises:
        CheckpointError: a tensor is missing or damaged.
    """

    captured = True

    def __init__(
        self,
        checkpoint: Checkpoint,
        names: Predicting,
        target: Decoder[Any, Any],
        backend: NetworkBackend,
        longest: int,
    ) -> None:
        self.shape, self.taps = target.config, (target.config.layers,)
        self._target, self._backend, self._names = target, backend, names
        name = names.layer(target.config.layers)
        parts = loading.PartLoader(checkpoint, self.shape, backend)
        turn = self.shape.rotary[-1].table(longest, self.shape.head_dim, backend.device)
        self._layer = parts.layer(name, *turn)
        self._joined = parts.linear(f"{name}.{names.joined}")
        norms = (names.embedded_norm, names.hidden_norm, names.norm)
        self._embedded_norm, self._hidden_norm, self._norm = (
            parts.vector(f"{name}.{norm}") for norm in norms
        )
        head, table = f"{name}.{names.head}", f"{name}.{names.embedding}.weight"
        self._head = parts.linear(head) if heads.holds(checkpoint, head) else target.head
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


def _names_of(target: Target) -> Predicting | None:
    """Where the layer is; None of a family that has none.

    Raises:
        EngineError: transformers' code runs a family that is declared, whose layer it has not.
    """
    family = find_family(target.checkpoint.config)
    if family is None:
        return UNDECLARED
    heads.declared(target)
    return family.predicting


def _load(checkpoint: Checkpoint, names: Predicting, target: Target) -> heads.Head:
    """The layer, ready to draft."""
    model, backend = target.model, chain.network_backend(target)
    longest = heads.longest_of(target, target.model.config)
    if isinstance(model, decoder.Decoder):
        return PredictingLayer(checkpoint, names, model, backend, longest)
    config, code = target.checkpoint.config, cast("CodeModel", model)
    return heads.CodePredictor(checkpoint, config, names, code, backend, longest)


def mtp_proposer(name: str | None, target: Target) -> HeadProposer:
    """A proposer that runs the layer of a model that predicts further tokens.

    Args:
        name: The checkpoint with that layer, a folder or `organization/model` on the Hugging Face
            hub; None for the model's own.

    Raises:
        CheckpointError: the layer is damaged.
        EngineError: there is none, it is another model's, the model is rotated, transformers' code
            runs a family that is declared, or memory is too small.
    """
    names, shape = _names_of(target), target.model.config
    checkpoint = read.Checkpoint.open(name) if name else target.checkpoint
    own = names or Predicting()
    layer = own.layer(len(target.model.layers))
    joined, seeds = f"{layer}.{own.joined}", residual_rotation.rotation_seeds
    rotated = [one.path for one in (target.checkpoint, checkpoint) if seeds(one.config)]
    if names is not None and rotated:
        raise EngineError(
            f"speculate: the residual stream of {rotated[0]} is rotated, and the layer for further "
            "tokens knows it as it was. Take ngram, suffix, draft=PATH or eagle=PATH, or a recipe "
            "without the method rotation, or with its residual: false"
        )
    if names is None or not heads.holds(checkpoint, joined):
        raise EngineError(
            f"speculate: {checkpoint.path} has no layer that predicts further tokens ({joined}). "
            "Models of DeepSeek-V3's, GLM-4.5's, MiMo's and Qwen3-Next's build are published "
            "with one; of a quantized checkpoint that lost it, give mtp=PATH with the folder of "
            "the original, or take ngram, suffix, draft=PATH or eagle=PATH"
        )
    unused = [other for other in checkpoint.predicting_layers if other != layer]
    if unused:
        log.warning(
            "speculate: %s drafts every token; %s of the same checkpoint draft none",
            layer,
            ", ".join(unused),
        )
    found, hidden = checkpoint.weight_shape(joined), shape.hidden_size
    if found != (hidden, 2 * hidden):
        raise CheckpointError(
            f"{checkpoint.path}: {joined}.weight is {list(found)}, and the model needs "
            f"[{hidden}, {2 * hidden}]. It is another model's, or damaged"
        )
    tensors = [n for n in checkpoint.names() if n.startswith(f"{layer}.")]
    weights = sum(prod(checkpoint.shape(n)) * checkpoint.dtype(n).itemsize for n in tensors)
    heads.require_room("its layer for further tokens", weights, target, shape)
    return heads.HeadProposer(_load(checkpoint, names, target), target)


METHOD = DraftMethod("mtp", mtp_proposer, takes_path=True, network=True)
