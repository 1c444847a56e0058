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
    Constant,
    KnownGatedMLP,
    KnownGatedNorm,
    KnownNorm,
    known_gated_mlp,
    known_gated_norm,
    known_norm,
    use_kernels,
)
from inference.transformers_code.linear import BackendLinear, PartOfLinear, SharedInput
from kernels.op_inputs import Gate


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


def mamba2(size, **given):
    from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated

    return MambaRMSNormGated(size, **given)


def falcon(size, **given):
    from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated

    return FalconH1RMSNormGated(size, **given)


def kimi(size, **given):
    from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNormGated

    return KimiLinearRMSNormGated(size, **given)


def qwen(size, **given):
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

    return Qwen3NextRMSNormGated(size, **given)


@pytest.mark.parametrize(
    ("kind", "given", "form"),
    [
        (mamba2, {"group_size": 4}, Gate(first=True, groups=2)),
        (mamba2, {"group_size": 8}, Gate(first=True)),
        (falcon, {"n_groups": 2, "norm_before_gate": False}, Gate(first=True, groups=2)),
        (falcon, {"n_groups": 2}, Gate(groups=2)),
        (kimi, {}, Gate(silu=False)),
        (qwen, {}, Gate()),
    ],
)
def test_gated_norms_are_found_and_compute_the_same(kind, given, form):
    module, (x, gate) = kind(8, **given), torch.randn(2, 1, 5, 8)
    module.weight.data = torch.rand(8)
    found = known_gated_norm(module)
    assert isinstance(found, KnownGatedNorm)
    assert found._form == form
    assert known_norm(module) is None
    with running(CodeStep.__new__(CodeStep), 0):
        assert torch.allclose(found(x, gate), module(x, gate), rtol=1e-4, atol=1e-5)


def test_other_gated_norms_are_left_as_they_are():
    module = qwen(8)
    module.activation = "tanh"
    assert known_gated_norm(module) is None
    assert known_gated_norm(Norm()) is None


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


def test_what_is_computed_of_a_weight_is_computed_once():
    weight, x = torch.randn(4), torch.randn(3, 4)
    own = Constant.of(nn.Parameter(weight))
    rates = -torch.exp(own.float())
    assert rates is -own.float().exp()
    assert type(rates * x) is torch.Tensor
    assert torch.equal(rates * x, -weight.exp() * x)
    assert torch.equal(own.exp().sum(), weight.exp().sum())
    assert torch.equal(own.exp(), weight.exp())  # and not what was found of it in between


def test_rotations_of_other_pairs_are_left_as_they_are():
    """Llama turns channels i and i + D / 2, Cohere 2 i and 2 i + 1."""
    from transformers.models.cohere.modeling_cohere import CohereAttention
    from transformers.models.llama.modeling_llama import LlamaAttention

    for kind, replaced in ((LlamaAttention, True), (CohereAttention, False)):
        module = kind.__new__(kind)
        nn.Module.__init__(module)
        use_kernels(module)
        assert ("forward" in module.__dict__) == replaced
