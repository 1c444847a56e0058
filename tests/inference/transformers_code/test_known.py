"""What our kernels compute in the place of transformers' code is found by comparing numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from formats.scheme import LayerScheme
from inference.cpu.backend import CpuBackend
from inference.cpu.loop import CodeStep
from inference.models.read import StoredLinear
from inference.transformers_code.attention import running
from inference.transformers_code.known import (
    KnownGatedMLP,
    KnownNorm,
    known_gated_mlp,
    known_norm,
    use_kernels,
)
from inference.transformers_code.linear import BackendLinear, PartOfLinear, SharedInput


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


class GatedMLP(nn.Module):
    """A gated MLP as transformers' files write it, of layers of a backend."""

    def __init__(self, act, swapped: bool = False, factor: float = 1.0) -> None:
        super().__init__()
        backend = CpuBackend()
        first = backend.linear(StoredLinear([["gate", "up"]], LayerScheme(), torch.randn(24, 8)))
        last = backend.linear(StoredLinear([["down"]], LayerScheme(), torch.randn(8, 12)))
        shared = SharedInput(first, [12, 12])
        self.gate_proj, self.up_proj = (PartOfLinear(shared, i) for i in range(2))
        self.down_proj, self.act, self._swapped, self._factor = (
            BackendLinear(last), act, swapped, factor,
        )  # fmt: skip

    def forward(self, x):
        gate, up = self.gate_proj(x), self.up_proj(x)
        gate, up = (up, gate) if self._swapped else (gate, up)
        return self.down_proj(self.act(gate) * up * self._factor)


@pytest.mark.parametrize("act", [nn.SiLU(), nn.GELU(), nn.GELU("tanh")])
def test_gated_mlps_are_found_and_compute_the_same(act):
    module, x = GatedMLP(act), torch.randn(5, 8)
    found = known_gated_mlp(module)
    assert isinstance(found, KnownGatedMLP)
    with running(CodeStep.__new__(CodeStep), 0):  # of which the product alone is asked
        assert torch.allclose(found(x), module(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "module",
    [GatedMLP(nn.ReLU()), GatedMLP(nn.SiLU(), swapped=True), GatedMLP(nn.SiLU(), factor=2.0)],
)
def test_other_mlps_are_left_as_they_are(module):
    assert known_gated_mlp(module) is None


def test_rotations_of_other_pairs_are_left_as_they_are():
    """Llama turns channels i and i + D / 2, Cohere 2 i and 2 i + 1."""
    from transformers.models.cohere.modeling_cohere import CohereAttention
    from transformers.models.llama.modeling_llama import LlamaAttention

    for kind, replaced in ((LlamaAttention, True), (CohereAttention, False)):
        module = kind.__new__(kind)
        nn.Module.__init__(module)
        use_kernels(module)
        assert ("forward" in module.__dict__) == replaced
