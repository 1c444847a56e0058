"""Attention of calibration with bounded logits, sinks and windows is that of transformers' code."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as softcapped
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as with_sinks

from calibrate.attention import plain_attention

T, GROUPS = 150, 2


@pytest.fixture
def qkv():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, heads, T, 16, generator=generator) for heads in (4, 2, 2)]


def causal(window=T):
    distance = torch.arange(T) - torch.arange(T)[:, None]
    return (distance <= 0) & (distance > -window)


def of_floats(seen):
    return torch.zeros(1, 1, T, T).masked_fill(~seen, float("-inf"))


def module(**own):
    return SimpleNamespace(num_key_value_groups=GROUPS, training=False, **own)


def test_bounded_logits(qkv):
    wanted, _ = softcapped(module(), *qkv, of_floats(causal()), scaling=0.5, softcap=2.0)
    found = plain_attention(*qkv, causal()[None, None], 0.5, softcap=2.0)
    assert torch.allclose(found.transpose(1, 2), wanted, atol=1e-5)


def test_sinks(qkv):
    sinks = torch.tensor([1.0, -2.0, 0.5, 3.0])
    wanted, _ = with_sinks(module(sinks=sinks), *qkv, of_floats(causal(20)), scaling=0.25)
    found = plain_attention(*qkv, None, 0.25, window=20, sinks=sinks)
    assert torch.allclose(found.transpose(1, 2), wanted, atol=1e-5)


def test_biases_by_distance(qkv):
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    keys = slopes[:, None, None] * torch.arange(T)  # of the key alone: the query's adds to all
    bias = of_floats(causal()) + keys
    wanted = F.scaled_dot_product_attention(*qkv, attn_mask=bias, enable_gqa=True)
    assert torch.allclose(plain_attention(*qkv, None, None, alibi=slopes), wanted, atol=1e-5)
