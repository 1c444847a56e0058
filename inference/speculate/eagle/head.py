"""An EAGLE-3 head (Li et al. 2025, arXiv 2503.01840, section 3).

With h_t what some blocks of the model read at token t, side by side, and e the model's embedding,

    g_t = fc(h_t)                                  the feature of token t
    a_t = attention([norm(e_{t+1}), norm(g_t)])    over all the positions up to t
    y_t = g_t + a_t + mlp(norm(g_t + a_t))
    logits of token t + 2 = lm_head(norm(y_t))

and where the model has not computed h_t yet, y_{t-1} stands for g_t. Where the residual stream is
in another basis than that of the model that the head was trained for, h and e are turned into that
(`formats.residual_rotation`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError
from formats.residual_rotation import change_of_basis
from inference.models.decoder import Decoder
from inference.models.parts import PartLoader
from inference.speculate.chain import NetworkBackend, Target
from inference.speculate.eagle.settings import EagleSettings, read_settings
from inference.speculate.head import HeadProposer, declared, longest_of, require_room
from kernels.attention_inputs import KVPool

EMBEDDING, DRAFTED = "embed_tokens.weight", "d2t"


class EagleHead:
    """A loaded head; see `inference.speculate.head.Head`.

    Args:
        checkpoint: Where it lies.
        settings: What it says of itself.
        target: The model that it drafts for.
        said: What config.json says of that.
        backend: Where that runs.
        longest: Most positions.

    Attributes:
        shape: Of its block.
        taps: Blocks of the model whose inputs it reads.

    Raises:
        CheckpointError: a tensor is missing or damaged.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        settings: EagleSettings,
        target: Decoder[Any, Any],
        said: Mapping[str, Any],
        backend: NetworkBackend,
        longest: int,
    ) -> None:
        self.shape, self.taps = settings.shape, settings.taps
        parts = PartLoader(checkpoint, settings.shape, backend)
        angles = settings.shape.rotary[0].table(longest, settings.shape.head_dim, backend.device)
        self._settings, self._target, self._backend = settings, target, backend
        self._layer = parts.layer(settings.block, *angles)
        self._hidden_norm = parts.vector(f"{settings.block}.hidden_norm")
        self._fc, self._norm = parts.linear("fc"), parts.vector("norm")
        self._head = parts.linear("lm_head")
        own = parts.finite(EMBEDDING) if EMBEDDING in checkpoint else None
        self._embedding = None if own is None else own.to(backend.device, backend.dtype)
        targets = _targets(checkpoint, settings)
        self._targets = None if targets is None else targets.to(backend.device)
        turn = change_of_basis(said, checkpoint.config, target.config.hidden_size)
        self._turn = None if turn is None else turn.to(backend.device, backend.dtype)

    @torch.no_grad()
    def features(self, hidden: Tensor) -> Tensor:
        """[T, taps, size of the model] to [T, H]: what the block reads of each token."""
        return self._fc(self._turned(hidden).flatten(1))

    @torch.no_grad()
    def run(self, batch: Any, features: Tensor, pool: KVPool) -> Tensor:
        """y [T, H]; K and V of the tokens go into the cache."""
        shape, layer, norm = self._settings.shape, self._layer, self._backend.rms_norm
        normed = norm(features, self._hidden_norm, shape.eps)
        x = normed if self._settings.residual_is_normed else features
        assert layer.before_attention is not None
        embedded = norm(self._embed(batch.ids), layer.before_attention, shape.eps)
        read = torch.cat([embedded, normed], dim=-1)
        return self._backend.run_block(shape, layer, read, x, batch, pool, shape.windows[0])

    @torch.no_grad()
    def logits(self, y: Tensor) -> Tensor:
        """fp32 [T, vocabulary of the model] of [T, H]; -inf of tokens that it never drafts."""
        shape = self._settings.shape
        own = self._head(self._backend.rms_norm(y, self._norm, shape.eps)).float()
        if self._targets is None:
            return own
        whole = own.new_full((len(own), shape.vocab_size), -torch.inf)
        return whole.index_copy_(1, self._targets, own)

    def _embed(self, ids: Tensor) -> Tensor:
        if self._embedding is not None:
            return self._embedding[ids]
        return self._turned(self._target.embed(ids))

    def _turned(self, x: Tensor) -> Tensor:
        """[..., size of the model] of its residual stream in the basis that the head knows."""
        return x if self._turn is None else x @ self._turn


def _targets(checkpoint: Checkpoint, settings: EagleSettings) -> Tensor | None:
    """int64 [logits of the head], the model's token of each; None where it is the same number.

    Raises:
        CheckpointError: it is missing, damaged or names a token that the model has not.
    """
    count, vocabulary = settings.vocabulary, settings.shape.vocab_size
    if count == vocabulary and DRAFTED not in checkpoint:
        return None
    targets = checkpoint.tensor(DRAFTED).long() + torch.arange(count)
    inside = 0 <= int(targets.min()) <= int(targets.max()) < vocabulary
    if not inside or len(targets.unique()) < count:
        raise CheckpointError(
            f"{checkpoint.path}: {DRAFTED}, what is added to a drafted token to make it the "
            f"model's, gives tokens twice or outside 0 to {vocabulary - 1}. The head is damaged"
        )
    return targets


def eagle_proposer(name: str, target: Target) -> HeadProposer:
    """A proposer that runs an EAGLE-3 head.

    Args:
        name: Its folder, or `organization/model` on the Hugging Face hub.
        target: The model that it drafts for.

    Raises:
        CheckpointError: it is no head of EAGLE-3's kind, or damaged.
        EngineError: it was trained for a model of another shape, the model is run by transformers'
            code, or memory is too small.
    """
    checkpoint, (model, backend) = Checkpoint.open(name), declared(target)
    settings = read_settings(checkpoint, model.config)
    require_room(f"the head {name}", checkpoint.nbytes, target, settings.shape)
    longest = longest_of(target, settings.shape)
    head = EagleHead(checkpoint, settings, model, target.checkpoint.config, backend, longest)
    return HeadProposer(head, target)
