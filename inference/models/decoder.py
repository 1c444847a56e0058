"""A decoder as its checkpoint describes it, loaded: Llama's block and its relatives.

Llama, Mistral (sliding window), Qwen2 (biases), Qwen3 (q and k norms). Touvron et al. 2023 (arXiv
2302.13971): RMSNorm before attention and before the feed-forward layer, rotary embedding, SwiGLU or
a mixture of them (Mixtral, Qwen2-MoE, Qwen3-MoE); grouped-query attention (Ainslie et al. 2023).
The layers a checkpoint has decide what a block has: biases, q/k norms, and routers of experts are
there if their tensors are.

Nothing here runs. Three interpreters read this description: `inference.cpu.fused` (one call of the
compiled kernels), `inference.cpu.decoder` (op by op) and `inference.gpu.decoder`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

import torch
from torch import Tensor

from formats.checkpoint.read import Checkpoint
from formats.memory import release_freed_memory
from inference.models.config import ModelConfig
from inference.models.feed_forward import FeedForward, load_feed_forward
from inference.models.layers import L, LayerFactory, X
from inference.models.read import read_linear


@dataclass(frozen=True)
class Layer(Generic[L, X]):
    """Weights of one decoder block; q/k/v are merged."""

    input_norm: Tensor
    qkv: L
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: L
    post_norm: Tensor
    feed_forward: FeedForward[L, X]

    @property
    def nbytes(self) -> int:
        """Bytes of its linear layers."""
        return self.qkv.nbytes + self.o.nbytes + self.feed_forward.nbytes


class Decoder(Generic[L, X]):
    """A loaded decoder.

    Args:
        checkpoint: Float or quantized.
        factory: The backend that it will run on: makes its layers.

    Attributes:
        config: Its shape.
        dtype: Of activations.
        embedding: [vocabulary, hidden], as stored, or the head's where it is tied and held as such.
        layers: Its blocks.
        norm: [hidden], before the head.
        head: Gives the logits.
        cos: fp32 [positions, head_dim].
        sin: fp32 [positions, head_dim].

    Raises:
        CheckpointError: it is not a decoder of this kind, or tensors are missing.
    """

    def __init__(self, checkpoint: Checkpoint, factory: LayerFactory[L, X]) -> None:
        self.config = config = ModelConfig.from_checkpoint(checkpoint)
        factory.check(config)
        self._checkpoint, self._factory, self.dtype = checkpoint, factory, factory.dtype
        own = "lm_head.weight" in checkpoint or "lm_head" in checkpoint.quantized_modules
        tied = config.tied and not own
        self.head = self._linear("model.embed_tokens" if tied else "lm_head")
        self.norm = self._vector("model.norm.weight")
        self.layers: list[Layer[L, X]] = []
        for i in range(config.layers):
            self.layers.append(self._load_layer(f"model.layers.{i}"))
            release_freed_memory()  # else what packing a layer leaves behind may add up
        angle = torch.outer(torch.arange(config.max_positions).float(), config.inverse_frequency)
        angle = torch.cat((angle, angle), dim=-1)
        self.cos = (angle.cos() * config.rope_scaling).to(factory.device)
        self.sin = (angle.sin() * config.rope_scaling).to(factory.device)
        # Last: nothing is held any more of what was held beside the packed layers.
        self.embedding = self._embedding(tied=tied)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights in memory."""
        embedding = 0 if self.embedding is self.head.matrix else self.embedding.nbytes
        return embedding + self.head.nbytes + sum(layer.nbytes for layer in self.layers)

    def _linear(self, *modules: str) -> L:
        return self._factory.linear(read_linear(self._checkpoint, modules, self._factory.device))

    def _vector(self, name: str) -> Tensor:
        return self._checkpoint.tensor(name).to(self._factory.device, self.dtype)

    def _embedding(self, *, tied: bool) -> Tensor:
        shared = self.head.matrix if tied else None
        if shared is not None:
            return shared
        own = self._checkpoint.tensor("model.embed_tokens.weight").to(self._factory.device)
        return own if own.dtype in (torch.float32, torch.bfloat16) else own.to(self.dtype)

    def _load_layer(self, name: str) -> Layer[L, X]:
        def norm(path: str) -> Tensor | None:
            full = f"{name}.self_attn.{path}.weight"
            return self._vector(full) if full in self._checkpoint else None

        return Layer(
            input_norm=self._vector(f"{name}.input_layernorm.weight"),
            qkv=self._linear(*(f"{name}.self_attn.{part}_proj" for part in "qkv")),
            q_norm=norm("q_norm"),
            k_norm=norm("k_norm"),
            o=self._linear(f"{name}.self_attn.o_proj"),
            post_norm=self._vector(f"{name}.post_attention_layernorm.weight"),
            feed_forward=load_feed_forward(
                self._checkpoint, name, self.config.routing, self._factory
            ),
        )
