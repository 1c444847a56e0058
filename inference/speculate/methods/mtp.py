"""Drafts of a model's own layer for multi-token prediction (MTP).

DeepSeek-V3 (arXiv 2412.19437, section 2.2) and models that took it over have a decoder block behind
their last one, number `num_hidden_layers`, and around it

    x_t = eh_proj [enorm(e_{t+1}), hnorm(h_t)]       h: the model's output behind its last norm
    y_t = block(x_t)                                 over all the positions up to t
    logits of token t + 2 = shared_head.head(shared_head.norm(y_t))

Where h_t is not there yet, y_{t-1} stands for it. Where a file lacks the embedding or the head,
they are the model's.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from formats.errors import CheckpointError, EngineError
from formats.namespace import later
from inference.proposers import DraftMethod

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from formats import residual_rotation
    from formats.checkpoint import read
    from formats.checkpoint.read import Checkpoint
    from inference.models import parts as loading
    from inference.models.decoder import Decoder
    from inference.speculate import head as heads
    from inference.speculate.chain import NetworkBackend, Target
    from inference.speculate.head import HeadProposer
    from kernels.attention_inputs import KVPool
else:
    torch = later("torch")
    residual_rotation = later("formats.residual_rotation")
    read = later("formats.checkpoint.read")
    loading = later("inference.models.parts")
    heads = later("inference.speculate.head")


class PredictingLayer:
    """A loaded layer; see `inference.speculate.head.Head`.

    Args:
        checkpoint: Where it lies.
        target: The model that it stands behind.
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
        self._target, self._backend, name = target, backend, layer_name(target)
        parts = loading.PartLoader(checkpoint, self.shape, backend)
        turn = self.shape.rotary[-1].table(longest, self.shape.head_dim, backend.device)
        self._layer = parts.layer(name, *turn)
        self._joined = parts.linear(f"{name}.eh_proj")
        norms = ("enorm", "hnorm", "shared_head.norm")
        self._embedded_norm, self._hidden_norm, self._norm = (
            parts.vector(f"{name}.{norm}") for norm in norms
        )
        head, table = f"{name}.shared_head.head", f"{name}.embed_tokens.weight"
        own = f"{head}.weight" in checkpoint or head in checkpoint.quantized_modules
        self._head = parts.linear(head) if own else target.head
        own = parts.finite(table) if table in checkpoint else None
        self._embedding = None if own is None else own.to(backend.device, backend.dtype)

    def features(self, hidden: Tensor) -> Tensor:
        """[T, 1, H] to [T, H]: the model's output behind its last norm."""
        return self._backend.rms_norm(hidden[:, 0].contiguous(), self._target.norm, self.shape.eps)

    def run(self, batch: Any, features: Tensor, pool: KVPool) -> Tensor:
        """y [T, H]; K and V of the tokens go into the cache."""
        ids, table, norm, eps = batch.ids, self._embedding, self._backend.rms_norm, self.shape.eps
        embedded = self._target.embed(ids) if table is None else table[ids]
        embedded = norm(embedded, self._embedded_norm, eps)
        x = self._joined(torch.cat([embedded, norm(features, self._hidden_norm, eps)], dim=-1))
        before = self._layer.before_attention
        read = x if before is None else norm(x, before, eps)
        window = self.shape.windows[-1]
        return self._backend.run_block(self.shape, self._layer, read, x, batch, pool, window)

    def logits(self, y: Tensor) -> Tensor:
        """fp32 [T, vocabulary] of [T, H]."""
        return self._head(self._backend.rms_norm(y, self._norm, self.shape.eps)).float()


def layer_name(target: Decoder[Any, Any]) -> str:
    """The full name of the layer behind a model's last block."""
    return f"model.layers.{target.config.layers}"


def mtp_proposer(name: str | None, target: Target) -> HeadProposer:
    """A proposer that runs the layer of a model that predicts further tokens.

    Args:
        name: The checkpoint with that layer, a folder or `organization/model` on the Hugging Face
            hub; None for the model's own.
        target: The model.

    Raises:
        CheckpointError: the layer is damaged.
        EngineError: there is none, it is another model's, the model is rotated and the layer is
            not, transformers' code runs the model, or memory is too small.
    """
    model, backend = heads.declared(target)
    checkpoint = read.Checkpoint.open(name or target.checkpoint.path, predicting=True)
    layer = layer_name(model)
    if model.config.family.predicting is None or f"{layer}.eh_proj.weight" not in checkpoint:
        raise EngineError(
            f"speculate: {checkpoint.path} has no layer that predicts further tokens ({layer}"
            ".eh_proj). Models of DeepSeek-V3's and GLM-4.5's build are published with one; of a "
            "quantized checkpoint without it, give mtp=PATH with the folder of the original, or "
            "take ngram, suffix, draft=PATH or eagle=PATH"
        )
    seeds_of = residual_rotation.rotation_seeds
    if seeds_of(target.checkpoint.config) != seeds_of(checkpoint.config):
        raise EngineError(
            f"speculate: the residual stream of {target.checkpoint.path} is rotated, and the layer "
            f"for further tokens in {checkpoint.path} knows it as it was. Take ngram, suffix, "
            "draft=PATH or eagle=PATH, or a recipe without the method rotation, or with its "
            "residual: false"
        )
    found, hidden = checkpoint.weight_shape(f"{layer}.eh_proj"), model.config.hidden_size
    if found != (hidden, 2 * hidden):
        raise CheckpointError(
            f"{checkpoint.path}: {layer}.eh_proj.weight is {list(found)}, and the model needs "
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
