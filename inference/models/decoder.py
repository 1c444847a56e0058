"""The Llama-like decoder: Llama, Mistral (sliding window), Qwen2 (biases), Qwen3 (q and k norms).

Touvron et al. 2023 (arXiv 2302.13971): RMSNorm before attention and before the feed-forward layer,
rotary embedding, SwiGLU or a mixture of them (Mixtral, Qwen2-MoE, Qwen3-MoE); grouped-query
attention (Ainslie et al. 2023). The layers a checkpoint has decide what a block has: biases, q/k
norms, and routers of experts are there if their tensors are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError
from formats.families.experts import EXPERT_NAMES
from formats.memory import release_freed_memory
from inference.cpu.fused import fuse
from inference.models import SUPPORTED_MODEL_TYPES
from inference.models.feed_forward import FeedForward, Routing, load_feed_forward
from inference.models.layers import Linear, Placement, load_linear
from kernels.attention_inputs import AttentionInputs, KVPool
from kernels.cpu.decoder import FusedDecoder
from kernels.ops import apply_rope, paged_attention, rms_norm, write_kv

if TYPE_CHECKING:
    from inference.gpu.layers import GpuLinear

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a decoder, from config.json.

    Attributes:
        windows: Sliding window of each layer, None for full attention.
        inverse_frequency: RoPE's, fp32 [head_dim / 2].
        rope_scaling: Factor of cos and sin (YaRN's), usually 1.
        routing: How experts are chosen; None for dense families.
        tied: Whether the embedding is the head's weight, if there is no other.
    """

    model_type: str
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    eps: float
    windows: tuple[int | None, ...]
    inverse_frequency: Tensor
    rope_scaling: float
    routing: Routing | None
    tied: bool

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> ModelConfig:
        """Read and check a checkpoint's configuration.

        Raises:
            CheckpointError: the family, activation or rotary embedding is not supported.
        """
        raw = dict(checkpoint.config)
        kind = raw.pop("model_type", None)
        if kind not in SUPPORTED_MODEL_TYPES:
            raise CheckpointError(
                f"model_type {kind!r} is not run here; supported are "
                f"{', '.join(SUPPORTED_MODEL_TYPES)}"
            )
        config = AutoConfig.for_model(kind, **raw)
        rope = (config.rope_parameters or {}).get("rope_type", "default")
        if rope not in ROPE_TYPES:
            raise CheckpointError(
                f"rope_type {rope!r} is not run here; supported are {', '.join(ROPE_TYPES)}"
            )
        if config.hidden_act != "silu":
            raise CheckpointError(f"hidden_act {config.hidden_act!r} is not run here, only silu")
        rotary = LlamaRotaryEmbedding(config)  # pyright: ignore[reportArgumentType]
        heads = config.num_attention_heads
        return cls(
            model_type=kind,
            layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            heads=heads,
            kv_heads=config.num_key_value_heads or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            vocab_size=config.vocab_size,
            max_positions=config.max_position_embeddings,
            eps=config.rms_norm_eps,
            windows=_windows(config),
            inverse_frequency=rotary.inv_freq.float(),
            rope_scaling=float(rotary.attention_scaling),
            routing=_routing(config),
            tied=config.tie_word_embeddings,
        )


def _windows(config: PretrainedConfig) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None)
    count = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None)
    if kinds is None:  # Mistral: all or none
        return (window,) * count
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _routing(config: PretrainedConfig) -> Routing | None:
    if config.model_type not in EXPERT_NAMES:
        return None
    mixtral = config.model_type == "mixtral"  # always normalizes, and has no setting for it
    return Routing(
        experts=config.num_local_experts if mixtral else config.num_experts,
        chosen=config.num_experts_per_tok,
        normalized=mixtral or config.norm_topk_prob,
    )


def _check_head_size(size: int) -> None:
    from kernels.triton.attention.paged_cache import HEAD_SIZES  # needs Triton

    if size not in HEAD_SIZES:
        raise CheckpointError(
            f"head_dim: found {size}; GPUs run {', '.join(map(str, HEAD_SIZES))}, the CPU any"
        )


@dataclass(frozen=True)
class Batch:
    """The tokens of one step.

    Attributes:
        ids: int64 [T].
        positions: int64 [T].
        slots: int64 [T], where K and V go in the cache.
        block_tables: int64 [S, blocks].
        query_start: int64 [S + 1].
        context_len: int64 [S].
        rows: int64 [R], the tokens whose logits are wanted.
    """

    ids: Tensor
    positions: Tensor
    slots: Tensor
    block_tables: Tensor
    query_start: Tensor
    context_len: Tensor
    rows: Tensor


@dataclass(frozen=True)
class Layer:
    """Weights of one decoder block; q/k/v are merged."""

    input_norm: Tensor
    qkv: Linear | GpuLinear
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Linear | GpuLinear
    post_norm: Tensor
    feed_forward: FeedForward


class LlamaModel:
    """A loaded decoder.

    Args:
        checkpoint: Float or quantized.
        place: Where it runs, and in which type; on a CPU, fp32 is the fast one.

    Attributes:
        config: Its shape.
        place: Where it runs.
        dtype: Of activations.
        embedding: [vocabulary, hidden], as stored; on a GPU, where it is tied, the head's.
        layers: Its blocks.
        norm: [hidden], before the head.
        head: Gives the logits.
        cos: [positions, head_dim].
        sin: Likewise.

    Raises:
        CheckpointError: it is not a decoder of this kind, or tensors are missing.
    """

    def __init__(self, checkpoint: Checkpoint, place: Placement) -> None:
        self.config = config = ModelConfig.from_checkpoint(checkpoint)
        if place.triton:
            _check_head_size(config.head_dim)
        device, dtype = place.device, place.dtype
        self._checkpoint, self.place, self.dtype = checkpoint, place, dtype
        own = "lm_head.weight" in checkpoint or "lm_head" in checkpoint.quantized_modules
        tied = config.tied and not own
        head = "model.embed_tokens" if tied else "lm_head"
        self.head = load_linear(checkpoint, [head], place)
        self.norm = self._vector("model.norm.weight")
        self.layers: list[Layer] = []
        for i in range(config.layers):
            self.layers.append(self._load_layer(f"model.layers.{i}"))
            release_freed_memory()  # else what packing a layer leaves behind may add up
        angle = torch.outer(torch.arange(config.max_positions).float(), config.inverse_frequency)
        angle = torch.cat((angle, angle), dim=-1)
        angles_in = torch.float32 if place.triton else dtype
        self.cos = (angle.cos() * config.rope_scaling).to(device, angles_in)
        self.sin = (angle.sin() * config.rope_scaling).to(device, angles_in)
        # Last: nothing is held any more of what was held beside the packed layers.
        self.embedding = self._embedding(tied=tied)
        self._fused: tuple[Sequence[KVPool], FusedDecoder | None] | None = None

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights in memory."""
        parts = [x for layer in self.layers for x in (layer.qkv, layer.o, layer.feed_forward)]
        shared = self.embedding is getattr(self.head.weight, "weight", None)
        embedding = 0 if shared else self.embedding.nbytes
        return embedding + sum(part.nbytes for part in (*parts, self.head))

    @torch.no_grad()
    def forward(self, batch: Batch, pools: Sequence[KVPool]) -> Tensor:
        """Run the tokens of a step; their K and V go into the cache.

        Returns:
            Logits fp32 [R, vocabulary] of the rows asked for.
        """
        if self.place.device.type == "cpu":
            fused = self._fused_on(pools)
            if fused is not None:
                return fused.step(**vars(batch))
        return self.forward_by_ops(batch, pools)

    @torch.no_grad()
    def forward_by_ops(self, batch: Batch, pools: Sequence[KVPool]) -> Tensor:
        """`forward`, op by op: for what is not fused, and to check what is; the bits are equal."""
        x = self.embedding[batch.ids].to(self.dtype)
        cos, sin = self.cos[batch.positions], self.sin[batch.positions]
        for layer, pool, window in zip(self.layers, pools, self.config.windows, strict=True):
            normed = rms_norm(x, layer.input_norm, self.config.eps)
            x = x + layer.o(self._attend(layer, normed, cos, sin, batch, pool, window))
            normed = rms_norm(x, layer.post_norm, self.config.eps)
            x = x + layer.feed_forward(normed)
        if not len(batch.rows):  # a step of prompts that go on
            return x.new_empty((0, self.config.vocab_size), dtype=torch.float32)
        x = rms_norm(x[batch.rows], self.norm, self.config.eps)
        return self.head(x).float()

    def _fused_on(self, pools: Sequence[KVPool]) -> FusedDecoder | None:
        """The whole decoder as one call, for a cache; None where a part of it is not fused."""
        if self._fused is None or self._fused[0] is not pools:
            self._fused = (pools, fuse(self, pools))
        return self._fused[1]

    def _attend(
        self,
        layer: Layer,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        batch: Batch,
        pool: KVPool,
        window: int | None,
    ) -> Tensor:
        c = self.config
        sizes = [c.heads * c.head_dim, c.kv_heads * c.head_dim, c.kv_heads * c.head_dim]
        q, k, v = (part.unflatten(-1, (-1, c.head_dim)) for part in layer.qkv(x).split(sizes, -1))
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = rms_norm(q, layer.q_norm, c.eps), rms_norm(k, layer.k_norm, c.eps)
        q, k = apply_rope(q, k, cos, sin)
        write_kv(k, v, pool, batch.slots)
        inputs = AttentionInputs(
            pool,
            batch.block_tables,
            batch.context_len,
            batch.query_start,
            softmax_scale=c.head_dim**-0.5,
            sliding_window=window,
        )
        return paged_attention(q, inputs).flatten(-2)

    def _vector(self, name: str) -> Tensor:
        return self._checkpoint.tensor(name).to(self.place.device, self.dtype)

    def _embedding(self, *, tied: bool) -> Tensor:
        if tied and self.place.triton:
            from kernels.triton.linear.dispatch import DenseWeight

            assert isinstance(self.head.weight, DenseWeight)
            return self.head.weight.weight
        own = self._checkpoint.tensor("model.embed_tokens.weight").to(self.place.device)
        return own if own.dtype in (torch.float32, torch.bfloat16) else own.to(self.dtype)

    def _load_layer(self, name: str) -> Layer:
        def linear(*paths: str) -> Linear | GpuLinear:
            modules = [f"{name}.{path}" for path in paths]
            return load_linear(self._checkpoint, modules, self.place)

        def norm(path: str) -> Tensor | None:
            full = f"{name}.self_attn.{path}.weight"
            return self._vector(full) if full in self._checkpoint else None

        return Layer(
            input_norm=self._vector(f"{name}.input_layernorm.weight"),
            qkv=linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            q_norm=norm("q_norm"),
            k_norm=norm("k_norm"),
            o=linear("self_attn.o_proj"),
            post_norm=self._vector(f"{name}.post_attention_layernorm.weight"),
            feed_forward=load_feed_forward(self._checkpoint, name, self.config.routing, self.place),
        )
