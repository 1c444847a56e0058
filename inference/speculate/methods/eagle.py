"""An EAGLE-3 head (Li et al. 2025, arXiv 2503.01840, section 3).

With h_t what some blocks of the model read at token t, side by side, and e the model's embedding,

    g_t = fc(h_t)                                  the feature of token t
    a_t = attention([norm(e_{t+1}), norm(g_t)])    over all the positions up to t
    y_t = g_t + a_t + mlp(norm(g_t + a_t))
    logits of token t + 2 = lm_head(norm(y_t))

and where the model has not computed h_t yet, y_{t-1} stands for g_t. Where the residual stream is
in another basis than that of the model that the head was trained for, h and e are turned into that
(`formats.residual_rotation`).

Heads are published in two layouts. The authors' (SpecForge writes it, too) has a config.json of a
Llama of one block, whose tensors are named `midlayer.*`. That of the library `speculators` keeps
the block's settings under `transformer_layer_config`, and calls it `layers.0.*`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from formats.errors import CheckpointError, EngineError
from formats.families.declared.llama import FAMILY as LLAMA
from formats.namespace import later
from inference.proposers import DraftMethod

if TYPE_CHECKING:
    from torch import Tensor

    from formats.checkpoint.read import Checkpoint
    from inference.models.config import ModelConfig
    from inference.models.decoder import Decoder
    from inference.speculate.chain import NetworkBackend, Target
    from inference.speculate.head import HeadProposer
    from kernels.op_inputs import KVPool
with later():
    import torch

    from formats import residual_rotation
    from formats.checkpoint import read
    from inference.models import config as shapes
    from inference.models import parts as loading
    from inference.speculate import head as heads

BLOCKS = ("midlayer", "layers.0")
ATTENTION = "self_attn"
EMBEDDING, DRAFTED = "embed_tokens.weight", "d2t"


@dataclass(frozen=True)
class EagleSettings:
    """What a head says of itself.

    Attributes:
        shape: Of its one block.
        block: The full name of that.
        taps: Blocks of the model whose inputs it reads, the number of blocks for the last output.
        residual_is_normed: Whether what the block adds to is its norm of the hidden state, and not
            the hidden state itself.
        vocabulary: Its logits.
    """

    shape: ModelConfig
    block: str
    taps: tuple[int, ...]
    residual_is_normed: bool
    vocabulary: int


def read_settings(checkpoint: Checkpoint, target: ModelConfig) -> EagleSettings:
    """Read and check what a head says of itself.

    Args:
        target: The shape of the model that it drafts for.

    Raises:
        CheckpointError: it is no head of EAGLE-3's kind, or damaged.
        EngineError: it was trained for a model of another shape.
    """
    said, name = checkpoint.config, checkpoint.path
    inner = said.get("transformer_layer_config", said)
    block = next((b for b in BLOCKS if heads.holds(checkpoint, f"{b}.{ATTENTION}.q_proj")), None)
    if block is None or not heads.holds(checkpoint, "fc"):
        raise CheckpointError(
            f"{name} is no EAGLE-3 head: it has no layer fc, or no block {' or '.join(BLOCKS)}. A "
            "whole model drafts as draft=PATH; heads of EAGLE and EAGLE-2 are not run"
        )
    if inner.get("num_hidden_layers", 1) != 1:
        raise CheckpointError(
            f"{name}: config.json gives num_hidden_layers {inner['num_hidden_layers']}; heads of "
            "one block are run"
        )
    shape = shapes.ModelConfig.of({"model_type": LLAMA.model_types[0], **inner})
    sizes = {
        "target_hidden_size": (said.get("target_hidden_size", shape.hidden_size), "hidden_size"),
        "vocab_size": (shape.vocab_size, "vocab_size"),
    }
    for key, (found, of_target) in sizes.items():
        if found != getattr(target, of_target):
            raise EngineError(
                f"speculate: the head {name} was trained for another model: its {key} is {found}, "
                f"and the model's {of_target} {getattr(target, of_target)}. Take one that was "
                "trained for this model"
            )
    taps = _taps(said, target.layers)
    if not taps or not all(0 <= tap <= target.layers for tap in taps):
        raise EngineError(
            f"speculate: the head {name} reads what blocks {list(taps)} of its model read, and the "
            f"model has {target.layers}. Take a head that was trained for this model"
        )
    _check_shapes(checkpoint, shape, block, len(taps) * target.hidden_size)
    return EagleSettings(
        shape=shape,
        block=block,
        taps=taps,
        residual_is_normed=bool(said.get("norm_before_residual", False)),
        vocabulary=checkpoint.weight_shape("lm_head")[0],
    )


def _taps(said: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """The blocks that are named, or those that the authors' code takes: low, middle and high."""
    key = "eagle_aux_hidden_state_layer_ids"
    named = said.get(key) or said.get("eagle_config", {}).get(key)
    return tuple(named) if named else (2, layers // 2, layers - 3)


def _check_shapes(checkpoint: Checkpoint, shape: ModelConfig, block: str, read: int) -> None:
    """Compare a head's weights with its settings.

    Raises:
        CheckpointError: one differs; it is named.
    """
    hidden, middle = shape.hidden_size, f"{block}.{ATTENTION}"
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    wanted = {
        "fc": (hidden, read),
        f"{middle}.q_proj": (queries, 2 * hidden),
        f"{middle}.k_proj": (keys, 2 * hidden),
        f"{middle}.v_proj": (keys, 2 * hidden),
        f"{middle}.o_proj": (hidden, queries),
        "lm_head": (checkpoint.weight_shape("lm_head")[0], hidden),
    }
    for module, (rows, columns) in wanted.items():
        found = checkpoint.weight_shape(module)
        if found != (rows, columns):
            raise CheckpointError(
                f"{checkpoint.path}: {module}.weight is {list(found)}, and its settings want "
                f"[{rows}, {columns}]. It is damaged, or its config.json is another's"
            )


class EagleHead:
    """A loaded head; see `inference.speculate.head.Head`.

    Args:
        settings: What it says of itself.
        target: The model that it drafts for.
        said: What config.json says of that.
        backend: Where that runs.
        longest: Most positions.

    Attributes:
        shape: Of its block.
        captured: That a GPU may capture its steps.
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
        self.captured, self.shape, self.taps = True, settings.shape, settings.taps
        parts = loading.PartLoader(checkpoint, settings.shape, backend)
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
        turn = residual_rotation.change_of_basis(said, checkpoint.config, target.config.hidden_size)
        self._turn = None if turn is None else turn.to(backend.device, backend.dtype)

    def features(self, hidden: Tensor) -> Tensor:
        """[T, taps, size of the model] to [T, H]: what the block reads of each token."""
        return self._fc(self._turned(hidden).flatten(1))

    def run(self, batch: Any, features: Tensor, pool: KVPool) -> Tensor:
        """y [T, H]; K and V of the tokens go into the cache."""
        shape, layer, norm = self._settings.shape, self._layer, self._backend.rms_norm
        normed = norm(features, self._hidden_norm, shape.eps)
        x = normed if self._settings.residual_is_normed else features
        assert layer.before_attention is not None
        embedded = norm(self._embed(batch.ids), layer.before_attention, shape.eps)
        read = torch.cat([embedded, normed], dim=-1)
        return self._backend.run_block(shape, layer, read, x, batch, pool, shape.windows[0])

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


def eagle_proposer(name: str | None, target: Target) -> HeadProposer:
    """A proposer that runs an EAGLE-3 head.

    Args:
        name: Its folder, or `organization/model` on the Hugging Face hub.
        target: The model that it drafts for.

    Raises:
        CheckpointError: it is no head of EAGLE-3's kind, or damaged.
        EngineError: it was trained for a model of another shape, the model is run by transformers'
            code, or memory is too small.
    """
    assert name is not None
    checkpoint, (model, backend) = read.Checkpoint.open(name), heads.declared(target)
    settings = read_settings(checkpoint, model.config)
    heads.require_room(f"the head {name}", checkpoint.nbytes, target, settings.shape)
    longest = heads.longest_of(target, settings.shape)
    head = EagleHead(checkpoint, settings, model, target.checkpoint.config, backend, longest)
    return heads.HeadProposer(head, target)


METHOD = DraftMethod("eagle", eagle_proposer, needs="the folder of a head", network=True)
