"""Experts' kernels in Triton's interpreter: sorting, rows of many weights at once, routing, sums."""

import pytest
import torch

from inference.cpu.layers import route as plain
from inference.models.config import Routing
from kernels.triton import experts as sorting
from kernels.triton import tuning
from kernels.triton.common import Workspace
from kernels.triton.experts import SortedRows, combine, route, sort_by_expert
from kernels.triton.fused import gated_product, quantize_rows
from kernels.triton.linear import launch, w8a8
from kernels.triton.linear.dispatch import pack
from kernels.triton.linear.fp4 import Fp4Weight, codes_of_e4m3
from kernels.triton.linear.launch import grid_of, tile_for
from kernels.triton.linear.w16a16 import DenseWeight
from kernels.triton.linear.weight import InputFormat
from tests.kernels.expert_cases import E2M1, EXACT, FAMILIES, make_rows, make_weights, plain_rows
from tests.kernels.triton_lab import building_for, compiled, interpreted
from tests.refusals import refused

EXPERTS = 4


def make_chosen(tokens: int, each: int, experts: int, skew: bool = False) -> torch.Tensor:
    """int32 [tokens, each], no expert twice; skewed, many tokens have the same first one."""
    generator = torch.Generator().manual_seed(tokens)
    rows = [torch.randperm(experts, generator=generator)[:each] for _ in range(tokens)]
    chosen = torch.stack(rows).int()
    if skew:
        chosen[: tokens // 2] = torch.arange(each, dtype=torch.int32)
    return chosen


@pytest.mark.parametrize(
    ("tokens", "each", "experts", "rows"),
    [(1, 2, 4, 16), (5, 8, 8, 16), (90, 4, 17, 16), (20, 2, 40, 16), (700, 2, 5, 64)],
)
@interpreted
def test_row_tiles_hold_the_pairs_of_an_expert_in_order(tokens, each, experts, rows):
    for skew in (False, True)[tokens < 9 :]:
        chosen = make_chosen(tokens, each, experts, skew)
        found = sort_by_expert(chosen, experts, rows)
        owners, pairs = [], []
        for e in range(experts):
            own = (chosen.flatten() == e).nonzero().flatten().tolist()
            for start in range(0, len(own), rows):
                owners.append(e)
                tile = own[start : start + rows]
                pairs.append(tile + [-1] * (rows - len(tile)))
        absent = len(found.experts) - len(owners)
        assert absent >= 0, "more row tiles than were foreseen"
        assert found.experts.tolist() == owners + [-1] * absent
        assert found.pairs[: len(pairs)].tolist() == pairs
    assert found.count == tokens * each


@pytest.mark.parametrize("family", FAMILIES)
@interpreted
def test_rows_of_experts_are_multiplied_by_their_weights(family):
    """By tokens, then by pairs, against fp64 and each expert alone; fewer tokens give the bits.

    An expert alone is no witness by itself: where a kernel misreads a weight, it does so twice.
    """
    weights, plain = make_weights(family, EXPERTS, 128, 256)
    workspace, tokens, each = Workspace.on("cpu", 1 << 18, 64), 5, 2
    chosen = make_chosen(tokens, each, EXPERTS, skew=True)
    owners = chosen.flatten().long()
    for rows in (tokens, tokens * each):
        x, scales = make_rows(family, rows, 256)

        def by_expert(x, scales, chosen):
            pairs = sort_by_expert(chosen, EXPERTS, 16)
            return weights[0].run(x, scales, workspace, torch.float32, pairs)

        got = by_expert(x, scales, chosen)
        source = torch.arange(tokens * each) // (tokens * each // rows)
        wanted, alone = torch.empty_like(got).double(), torch.empty_like(got)
        for e in range(EXPERTS):
            own = source[owners == e]
            part = None if scales is None else scales[own]
            wanted[owners == e] = plain[e](plain_rows(x[own], part))
            alone[owners == e] = weights[e].run(x[own], part, workspace, torch.float32)
        if family in EXACT:
            assert torch.equal(got, alone)
        for found in (got, alone):
            assert (found - wanted).norm() < 1e-3 * wanted.norm()
        few = slice(2 * rows // tokens)
        of_few = None if scales is None else scales[few]
        first = by_expert(x[few].contiguous(), of_few, chosen[:2])
        assert torch.equal(first, got[: 2 * each])
    assert not workspace.arrivals.any()
    refused("needed is one for each of 10 pairs", by_expert, *make_rows(family, 3, 256), chosen)


@pytest.mark.parametrize("family", FAMILIES)
@interpreted
def test_few_pairs_are_tiles_as_they_come(family):
    """With the bits that they have when they are sorted, also where two are of one expert."""
    weights, _ = make_weights(family, 16, 64, 256)
    workspace, found = Workspace.on("cpu", 1 << 18, 64), []
    chosen = torch.tensor([[9, 3], [3, 12]], dtype=torch.int32)
    for rows in (2, 4):
        x, scales = make_rows(family, rows, 256)
        for few in (4, 5):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(sorting, "FEW", few)
                pairs = sort_by_expert(chosen, 16, 16)
            assert (pairs.pairs is None) == (few == 4)
            found.append(weights[0].run(x, scales, workspace, torch.float32, pairs))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[2], found[3])


@interpreted
def test_rows_of_experts_end_where_their_inputs_do():
    """160 inputs are 128 and a rest; what lies after a row in memory is another's."""
    x, _ = make_rows("mxfp4", 5, 160)
    chosen = make_chosen(5, 1, 2)
    pairs = sort_by_expert(chosen, 2, 16)
    for family, outputs in (("mxfp4", 64), ("w16a16", 40)):
        weights, plain = make_weights(family, 2, outputs, 160)
        got = weights[0].run(x, None, Workspace.on("cpu", 1 << 18, 64), torch.float32, pairs)
        for e in range(2):
            own = chosen.flatten() == e
            wanted = plain[e](x[own].double())
            torch.testing.assert_close(got[own].double(), wanted, atol=1e-3, rtol=1e-3)


def test_fp4_weights_are_packed_where_their_scales_are_multiples():
    q = E2M1.to(torch.float8_e4m3fn)
    assert codes_of_e4m3(q).tolist() == list(range(16))
    q, rows = q.repeat(64, 10).view(1, 64, 160), InputFormat(torch.float16)
    for first, kind in ((2.0**-28, Fp4Weight), (2.0**-29, DenseWeight)):
        scale = torch.tensor([first, 1, 1, 1, 1]).expand(1, 64, 5)
        own = pack(q, scale, None, None, rows, rows.dtype, bits=4, group=32)
        assert type(own) is kind


@pytest.mark.parametrize("family", FAMILIES)
@interpreted
def test_places_of_more_than_32_bits(family):
    """As those of 128k tokens of 28672 inputs: the same sums, of all rows and of experts'."""
    weight, workspace = make_weights(family, 2, 128, 256)[0][0], Workspace.on("cpu", 1 << 18, 64)
    x, scales = make_rows(family, 70, 256)
    own = sorting.sort_by_expert(make_chosen(70, 1, 2), 2, 16)
    found = []
    for counted in (1 << 31, 0):
        with pytest.MonkeyPatch.context() as patch:
            for module in (launch, w8a8):
                patch.setattr(module, "COUNTED", counted)
            found.append(weight.run(x, scales, workspace, torch.float32, own))
            tile = weight.few_rows_tile(x)
            found.append(weight.run(x, scales, workspace, torch.float32, tile=tile))
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])


@pytest.mark.parametrize("family", ["w4a16", "w16a16"])
@pytest.mark.parametrize(("experts", "outputs"), [(4, 1024), (8, 512), (1, 64), (128, 1536)])
@interpreted
def test_sums_of_many_row_tiles_fit_in_a_workspace(family, experts, outputs):
    """Few outputs of few experts are split, but not where their rows alone fill the device."""
    workspace, x = Workspace.on("meta"), torch.empty(1, device="meta")
    for pairs in (2, 16, 256, 4096, 1 << 18):
        most = min(pairs, experts)
        for rows in (16, 64):
            number = most + (pairs - most) // rows
            own = torch.empty(number), torch.empty(number, rows, device="meta")
            sorted_rows = SortedRows(*own, rows, pairs, experts)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(tuning, "multiprocessors", lambda device: 132)
                tile = tile_for(family, x, outputs, 4096, sorted_rows)
            assert grid_of(tile, pairs, outputs, workspace, sorted_rows)[2] == number


@interpreted
def test_routing():
    logits = torch.randn(7, 60)
    logits[3, 7:11] = 5.0  # equal: the lower numbers
    for normalized in (False, True):
        weights, chosen = route(logits, 3, normalized)
        wanted, order = torch.sort(torch.softmax(logits, 1), dim=1, descending=True, stable=True)
        wanted = wanted[:, :3] / (wanted[:, :3].sum(1, keepdim=True) if normalized else 1.0)
        torch.testing.assert_close(weights, wanted)
        assert torch.equal(chosen, order[:, :3].int())
    refused("6 of 5 experts", route, torch.zeros(1, 5), 6, False)
    refused("from 1 of 2 groups", route, torch.zeros(1, 4), 3, False, groups=2, chosen_groups=1)


@pytest.mark.parametrize(
    ("experts", "routing"),
    [
        (60, {"sigmoid": True, "normalized": True, "factor": 2.5}),
        (40, {"normalized": False, "groups": 5, "chosen_groups": 2, "factor": 16.0}),
        (48, {"sigmoid": True, "normalized": True, "groups": 8, "best_of_group": 2}),
        (200, {"normalized": True}),
        (200, {"sigmoid": True, "normalized": True, "groups": 8, "best_of_group": 2}),
    ],
)
@interpreted
def test_routing_by_sigmoids_groups_and_corrections(experts, routing):
    """The kernel chooses and weighs as torch does, of any kind of routing."""
    logits = torch.randn(7, experts)
    routing = {"chosen_groups": 3 if routing.get("groups") == 8 else 1} | routing
    corrections = [None]
    if routing.get("sigmoid"):
        corrections.append(torch.randn(experts) * 0.3 - 1)
    for correction in corrections:
        weights, chosen = route(logits, 3, correction=correction, **routing)
        names = {key: value for key, value in routing.items() if key != "sigmoid"}
        kind = "sigmoid" if routing.get("sigmoid") else "softmax"
        described = Routing(experts=experts, chosen=3, scores=kind, **names)
        wanted, numbers = plain(logits, described, correction)
        assert torch.equal(chosen, numbers.int())
        torch.testing.assert_close(weights, wanted)


@interpreted
def test_the_sum_of_a_tokens_experts():
    outputs, weights = torch.randn(8, 1100).half(), torch.randn(4, 2).abs()
    shared, gate = torch.randn(4, 1100).half(), torch.randn(4, 1).half()
    own = outputs.view(4, 2, 1100).float()
    wanted = own[:, 0] * weights[:, :1] + own[:, 1] * weights[:, 1:]
    assert torch.equal(combine(outputs, weights), wanted.half())
    wanted += shared.float() * torch.sigmoid(gate.float())
    torch.testing.assert_close(combine(outputs, weights, shared, gate), wanted.half())
    wanted = own[:, 0] * weights[:, :1] + own[:, 1] * weights[:, 1:] + shared.float()
    assert torch.equal(combine(outputs, weights, shared), wanted.half())
    refused(r"contiguous \[8, H\]", combine, outputs[:7], weights)
    refused("an expert of all tokens", combine, outputs, weights, shared[:3])
    refused("an expert of all tokens", combine, outputs, weights, None, gate)


@interpreted
def test_rows_quantized_with_the_scale_of_their_expert():
    scale = torch.tensor([0.01, 0.02, 0.05])
    owners = torch.tensor([2, 0, 1, 1, 0, 2], dtype=torch.int32)
    x = torch.randn(3, 256).half()
    rows, scales = quantize_rows(x, scale, torch.int8, experts=owners)
    assert torch.equal(scales, scale[owners.long()][:, None])
    for pair, e in enumerate(owners.tolist()):
        wanted, _ = quantize_rows(x[pair // 2][None].contiguous(), scale[e : e + 1])
        assert torch.equal(rows[pair], wanted[0])
    both = x.repeat(2, 1)
    rows, scales = gated_product(both, scale, torch.int8, experts=owners)
    for pair, e in enumerate(owners.tolist()):
        wanted, _ = gated_product(both[pair][None], scale[e : e + 1])
        assert torch.equal(rows[pair], wanted[0])
        assert scales[pair] == scale[e]
    with pytest.raises(ValueError, match="experts are named for their scales"):
        quantize_rows(x, None, torch.int8, experts=owners)


@pytest.mark.parametrize(
    ("capability", "families"),
    [
        (80, ("w4a8", "w16a16")),
        (89, ("w8a8", "fp8_block")),
        (90, ("w4a16", "w4a8_two_level", "w8a8", "fp8", "fp8_block", "w16a16", "mxfp4")),
    ],
)
@compiled
def test_what_they_become(capability, families):
    """Nothing is spilled, all products are the tensor cores'; row tiles that are not there end."""
    workspace = Workspace.on("cpu", 1 << 20, 1 << 12)
    chosen = torch.zeros(5, 8, dtype=torch.int32)
    hopper = capability == 90
    with building_for(capability) as built:
        route(torch.zeros(5, 128), 8, True)
        sort_by_expert(chosen, 128, 16)
        sort_by_expert(torch.zeros(40, 8, dtype=torch.int32), 128, 16)
        combine(torch.zeros(40, 2048).half(), torch.zeros(5, 8))
    for family in families:
        weight = make_weights(family, 1, 1536, 1024)[0][0]
        x, scales = make_rows(family, 5, 1024)
        with building_for(capability) as own, pytest.MonkeyPatch.context() as patch:
            patch.setattr(tuning, "multiprocessors", lambda device: 132)
            for rows in (16, weight.tallest_tile):
                pairs = sort_by_expert(chosen, 128, rows)
                own.pop()
                weight.run(x, scales, workspace, torch.bfloat16, pairs)
        product = r"wgmma\.mma_async" if hopper else r"mma\.sync"
        assert all(binary.count(product) for binary in own), family
        built += own
    for binary in built:
        assert not binary.spills()
        assert binary.shared <= {80: 166912, 89: 101376, 90: 232448}[capability]
        assert bool(binary.count(r"griddepcontrol\.wait")) == hopper
