"""An EAGLE-3 head as it is trained: one block with the tensors of the published layout.

`inference.speculate.methods.eagle` has the equations, and runs what this writes.

Training-time test (Li et al. 2025, arXiv 2503.01840, section 3.2): where it drafts, the head reads
its own output of the step before in place of the model's hidden states. So it is run several times
over the same text, each time on its own output of the time before; in pass j the token at t sees
what the first pass has of tokens up to t, and of the later passes what they have at t alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)


@dataclass(frozen=True)
class Past:
    """What attention sees of the passes so far.

    Attributes:
        k: Of each pass [B, Hkv, T, D].
        v: Likewise.
    """

    k: list[Tensor]
    v: list[Tensor]


class Attention(nn.Module):
    """Grouped-query attention over [embedding, hidden state] of each token."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        hidden, heads = config.hidden_size, config.num_attention_heads
        size, kv = config.head_dim or hidden // heads, config.num_key_value_heads or heads
        self._size, self._groups = size, heads // kv
        self.q_proj = nn.Linear(2 * hidden, heads * size, bias=False)
        self.k_proj = nn.Linear(2 * hidden, kv * size, bias=False)
        self.v_proj = nn.Linear(2 * hidden, kv * size, bias=False)
        self.o_proj = nn.Linear(heads * size, hidden, bias=False)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], past: Past) -> Tensor:
        """[B, T, 2 H] to [B, T, H]; its own K and V join the past."""
        q, k, v = (
            part(x).unflatten(-1, (-1, self._size)).transpose(1, 2)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = apply_rotary_pos_emb(q, k, *turn)
        past.k.append(k.repeat_interleave(self._groups, dim=1))
        past.v.append(v.repeat_interleave(self._groups, dim=1))
        scores = [q @ past.k[0].transpose(-1, -2)]  # [B, heads, T, T]
        later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
        scores[0] = scores[0].masked_fill(later, -torch.inf)
        scores += [(q * own).sum(-1, keepdim=True) for own in past.k[1:]]
        chances = (torch.cat(scores, dim=-1) * self._size**-0.5).softmax(dim=-1)
        mixed = chances[..., : q.shape[2]] @ past.v[0]
        for i, own in enumerate(past.v[1:]):
            mixed = mixed + chances[..., q.shape[2] + i, None] * own
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """The head's decoder block."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        eps = config.rms_norm_eps
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, eps)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps)
        self.mlp = LlamaMLP(config)

    def forward(
        self, embedded: Tensor, hidden: Tensor, turn: tuple[Tensor, Tensor], past: Past
    ) -> Tensor:
        """[B, T, H] twice to the same."""
        read = torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], dim=-1)
        x = hidden + self.self_attn(read, turn, past)
        return x + self.mlp(self.post_attention_layernorm(x))


class HeadNetwork(nn.Module):
    """An EAGLE-3 head.

    Args:
        config: Of its block; `vocab_size` is the model's.
        taps: Blocks of the model whose inputs it reads.
        tokens: int64 [draft vocabulary], those that it drafts, ascending.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: LlamaConfig, taps: Sequence[int], tokens: Tensor) -> None:
        super().__init__()
        self.config, self.taps = config, tuple(taps)
        self.fc = nn.Linear(len(taps) * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = Block(config)
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, len(tokens), bias=False)
        drafted = torch.zeros(config.vocab_size, dtype=torch.bool)
        drafted[tokens] = True
        self.register_buffer("d2t", tokens - torch.arange(len(tokens)))
        self.register_buffer("t2d", drafted)
        self._rotary = LlamaRotaryEmbedding(config)

    def forward(self, embedded: Tensor, hidden: Tensor, passes: int) -> Iterator[Tensor]:
        """Logits of each pass.

        Args:
            embedded: The model's embedding of tokens 1 to T + passes - 1 [B, T + passes - 1, H].
            hidden: Hidden states of the model at tokens 0 to T - 1 [B, T, taps H].
            passes: How often it is run.

        Yields:
            [B, T, draft vocabulary], in pass j of token t + 2 + j.
        """
        x, past, length = self.fc(hidden), Past([], []), hidden.shape[1]
        for j in range(passes):
            places = torch.arange(j, j + length, device=x.device)[None]
            turn = self._rotary(x, places)
            x = self.midlayer(embedded[:, j : j + length], x, turn, past)
            yield self.lm_head(self.norm(x))

    def loss(self, logits: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """Cross entropy with the model, and how often both like the same token best.

        Args:
            logits: [B, T, draft vocabulary] of a pass.
            wanted: The model's logits of the same tokens [B, T, vocabulary].

        Returns:
            Nats per token, over those whose likeliest token can be drafted; the share of all.
        """
        tokens = self.d2t + torch.arange(len(self.d2t), device=logits.device)
        best = wanted.argmax(-1)
        can, own = self.t2d[best], wanted.index_select(-1, tokens).softmax(-1)
        nats = -(own * functional.log_softmax(logits.float(), -1)).sum(-1)
        right = tokens[logits.argmax(-1)] == best
        return (nats * can).sum() / can.sum().clamp(min=1), right.float().mean()
