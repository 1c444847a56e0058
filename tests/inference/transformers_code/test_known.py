"""What our kernels compute in the place of transformers' code is found by comparing numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from inference.transformers_code.known import KnownNorm, known_norm, use_kernels


class Norm(nn.Module):
    """RMSNorm as transformers' files write it; `fault` makes it another one."""

    def __init__(self, fault: str = "", offset: float = 0.0) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.rand(8)), 1e-6
        self._fault, self._offset = fault, offset

    def forward(self, x):
        centred = x - x.mean(-1, keepdim=True) if self._fault == "centred" else x
        eps = 1e-5 if self._fault == "eps" else self.variance_epsilon
        y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
        return y * (self._offset + self.weight)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norms_are_found(offset):
    norm = Norm(offset=offset)
    found = known_norm(norm)
    assert isinstance(found, KnownNorm)
    assert torch.allclose(found.weight, norm.weight + offset)


@pytest.mark.parametrize("module", [Norm("centred"), Norm("eps"), nn.LayerNorm(8), nn.Linear(8, 8)])
def test_others_are_left_as_they_are(module):
    assert known_norm(module) is None


def test_rotations_of_other_pairs_are_left_as_they_are():
    """Llama turns channels i and i + D / 2, Cohere 2 i and 2 i + 1."""
    from transformers.models.cohere.modeling_cohere import CohereAttention
    from transformers.models.llama.modeling_llama import LlamaAttention

    for kind, replaced in ((LlamaAttention, True), (CohereAttention, False)):
        module = kind.__new__(kind)
        nn.Module.__init__(module)
        use_kernels(module)
        assert ("forward" in module.__dict__) == replaced
