"""Attention of older classes of transformers, called through its attention interface.

Some classes compute attention inside of their modules, by products of their own. Here such a module
is given another `forward`: its own linear layers, norms and rotation, and between them a call of
the function that transformers knows by a name, as newer classes have it. The bias of ALiBi (Press
et al. 2022, arXiv 2108.12409) is an argument of that function, `alibi`: slopes m fp32 [heads] of
biases m (j - i) that are added to query i's logit of key j. Only the heads of K and V that a model
has are handed over, also where its own code repeats them. No mask is built: all these models are
causal, and where a layer sees a window, its size is an argument.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

UNMASKED = "ptq_unmasked"  # the name by which adapted models ask for masks, and get none
Out = tuple[Tensor, None]


def _no_mask(*_: Any, device: Any = None, **__: Any) -> Tensor:
    return torch.empty(0, device=device)


ALL_MASK_ATTENTION_FUNCTIONS.register(UNMASKED, _no_mask)


def alibi_slopes(heads: int, device: torch.device | str) -> Tensor:
    """Slopes fp32 [heads] of ALiBi: 2 ** (-8 i / n) for i = 1 ... n of n heads, n a power of two.

    Otherwise those of the power of two n below, and then of the odd i of 2 n.
    """
    n = 2 ** math.floor(math.log2(heads))
    i = torch.arange(1, n + 1, device=device, dtype=torch.float32)
    odd = 2 * torch.arange(heads - n, device=device, dtype=torch.float32) + 1
    return torch.exp2(torch.cat((-8 * i / n, -4 * odd / n)))


class Adapted(nn.Module):
    """What an adapted attention module has beside its own parts.

    Attributes:
        interface: transformers' name of the attention that it computes with.
    """

    interface: str

    def attended(self, q: Tensor, k: Tensor, v: Tensor, scale: float, **arguments: Any) -> Tensor:
        """Attention [B, T, heads * D] of q [B, T, heads, D] over k and v [B, T, kv heads, D]."""
        function = ALL_ATTENTION_FUNCTIONS[self.interface]
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out, _ = function(self, q, k, v, None, dropout=0.0, scaling=scale, **arguments)
        return out.flatten(2)

    def own(self, name: str) -> Any:
        """A function beside the class in its file."""
        return getattr(sys.modules[type(self).__module__], name)


class _Bloom(Adapted):
    def forward(self, hidden_states: Tensor, residual: Tensor, *_: Any, **__: Any) -> Out:
        my: Any = self
        heads = my.query_key_value(hidden_states).unflatten(-1, (my.num_heads, 3, my.head_dim))
        slopes = alibi_slopes(my.num_heads, heads.device)
        out = self.attended(*heads.unbind(-2), scale=my.head_dim**-0.5, alibi=slopes)
        return my.dense(out) + residual, None


class _Falcon(Adapted):
    def forward(
        self,
        hidden_states: Tensor,
        alibi: Tensor | None,
        attention_mask: Tensor | None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **_: Any,
    ) -> Out:
        my: Any = self
        q, k, v = self._heads(my.query_key_value(hidden_states))
        scale, slopes = my.head_dim**-0.5, None
        if alibi is None:
            turn = self.own("apply_rotary_pos_emb")
            q, k = (x.transpose(1, 2) for x in (q, k))
            q, k = (x.transpose(1, 2) for x in turn(q, k, *(position_embeddings or ())))
        else:  # added before the factor, and rounded as these models were trained
            slopes = alibi_slopes(my.num_heads, q.device).bfloat16().float() * scale
        return my.dense(self.attended(q, k, v, scale, alibi=slopes)), None

    def _heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v [B, T, heads, D], which lie side by side for each head of K."""
        my: Any = self
        groups = my.num_kv_heads
        x = x.unflatten(-1, (groups, my.num_heads // groups + 2, my.head_dim))
        return x[..., :-2, :].flatten(2, 3), x[..., -2, :], x[..., -1, :]


class _Mpt(Adapted):
    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Out:
        my: Any = self
        qkv = my.Wqkv(hidden_states)
        if my.clip_qkv:
            qkv = qkv.clamp(-my.clip_qkv, my.clip_qkv)
        q, k, v = qkv.unflatten(-1, (3, my.n_heads, my.head_dim)).unbind(-3)
        slopes = alibi_slopes(my.n_heads, qkv.device)
        return my.out_proj(self.attended(q, k, v, my.softmax_scale, alibi=slopes)), None


class _Sinusoidal(Adapted):
    """GPT-J's rotation: neighbouring channels together, the first `rotary_dim` of each head."""

    def turned(self, q: Tensor, k: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys [B, T, heads, D], turned by their positions, of their type."""
        my: Any = self
        sin, cos = my.embed_positions[position_ids].chunk(2, dim=-1)
        turn, size = self.own("apply_rotary_pos_emb"), my.rotary_dim or q.shape[-1]

        def one(x: Tensor) -> Tensor:
            parts = turn(x[..., :size], sin, cos).to(x.dtype), x[..., size:]
            return torch.cat(parts, dim=-1)

        return one(q), one(k)


class _GPTJ(_Sinusoidal):
    def forward(self, hidden_states: Tensor, *, position_ids: Tensor, **_: Any) -> Out:
        my: Any = self
        layers = (my.q_proj, my.k_proj, my.v_proj)
        q, k, v = (layer(hidden_states).unflatten(-1, (-1, my.head_dim)) for layer in layers)
        q, k = self.turned(q, k, position_ids)
        return my.out_proj(self.attended(q, k, v, my.head_dim**-0.5)), None


class _CodeGen(_Sinusoidal):
    SHARDS = 4  # of the machine it was trained on: q, v and k lie side by side in each

    def forward(self, hidden_states: Tensor, *, position_ids: Tensor, **_: Any) -> Out:
        my: Any = self
        parts = my.qkv_proj(hidden_states).unflatten(-1, (self.SHARDS, 3, -1)).unbind(-2)
        q, v, k = (part.flatten(2).unflatten(-1, (-1, my.head_dim)) for part in parts)
        q, k = self.turned(q, k, position_ids)
        return my.out_proj(self.attended(q, k, v, my.head_dim**-0.5)), None


class _GPTNeo(Adapted):
    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Out:
        my: Any = self
        layers = (my.q_proj, my.k_proj, my.v_proj)
        q, k, v = (layer(hidden_states).unflatten(-1, (-1, my.head_dim)) for layer in layers)
        local = my.attention_type == "local"
        window = {"sliding_window": my.config.window_size} if local else {}
        return my.out_proj(self.attended(q, k, v, 1.0, **window)), None


class _GPTNeoXJapanese(Adapted):
    def forward(
        self, hidden_states: Tensor, *_: Any, position_embeddings: tuple[Tensor, Tensor], **__: Any
    ) -> tuple[Tensor, None, Tensor | None]:
        my: Any = self
        size, turned = (my.num_attention_heads, 3 * my.head_size), my.rotary_ndims
        q, k, v = my.query_key_value(hidden_states).unflatten(-1, size).chunk(3, dim=-1)
        rotated = self.own("apply_rotary_pos_emb")(
            q[..., :turned], k[..., :turned], *position_embeddings, unsqueeze_dim=2
        )
        q, k = (torch.cat((r, x[..., turned:]), -1) for r, x in zip(rotated, (q, k), strict=True))
        return my.dense(self.attended(q, k, v, my.head_size**-0.5)), None, my.dense_bias


class _XGLM(Adapted):
    def forward(self, hidden_states: Tensor, **_: Any) -> Out:
        my: Any = self
        layers = (my.q_proj, my.k_proj, my.v_proj)
        q, k, v = (layer(hidden_states).unflatten(-1, (-1, my.head_dim)) for layer in layers)
        return my.out_proj(self.attended(q, k, v, my.scaling)), None


ADAPTERS: dict[str, type[Adapted]] = {
    "BloomAttention": _Bloom,
    "CodeGenAttention": _CodeGen,
    "FalconAttention": _Falcon,
    "GPTJAttention": _GPTJ,
    "GPTNeoSelfAttention": _GPTNeo,
    "GPTNeoXJapaneseAttention": _GPTNeoXJapanese,
    "MptAttention": _Mpt,
    "XGLMAttention": _XGLM,
}
PLAIN_LINEAR = ("FalconLinear",)  # classes that compute what nn.Linear does


def adapted_model(config: PretrainedConfig, attention: str) -> Any | None:
    """A model of such a class on the device of the moment; None where a class needs no adapting.

    Args:
        attention: transformers' name of the attention that it is to compute with.
    """
    kind: Any = AutoModelForCausalLM._model_mapping.get(type(config), None)
    beside = vars(sys.modules[kind.__module__]) if kind is not None else {}
    if not ADAPTERS.keys() & beside.keys():
        return None
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for module in model.modules():
        mixin = ADAPTERS.get(type(module).__name__)
        if mixin is not None:
            own = type(module)
            module.__class__ = type(own.__name__, (mixin, own), {"__module__": own.__module__})
            module.interface = attention
        elif type(module).__name__ in PLAIN_LINEAR:
            module.__class__ = nn.Linear
    model.config._attn_implementation = UNMASKED
    return model
