"""Rows of experts on a GPU: all weights at once give what fp64 does, and what each gives alone."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
EXPERTS, EACH, INPUTS = 16, 4, 1024


@pytest.mark.parametrize("ready", [False, True])
@pytest.mark.parametrize(("tokens", "rows"), [(3, 16), (70, 32), (300, 64)])
@pytest.mark.parametrize("by_pair", [False, True])
def test_rows_of_experts_are_multiplied_by_their_weights(tokens, rows, by_pair, ready):
    """Scales are far apart, so that another expert's, or another block's, is seen."""
    from dataclasses import replace

    from kernels.triton.common import Workspace
    from kernels.triton.experts import sort_by_expert
    from tests.kernels.expert_cases import EXACT, FAMILIES, make_rows, make_weights, plain_rows

    torch.manual_seed(0)
    workspace = Workspace.on("cuda")
    for family in FAMILIES:
        with torch.device("cuda"):
            weights, plain = make_weights(family, EXPERTS, 768, INPUTS)
            x, scales = make_rows(family, tokens * EACH if by_pair else tokens, INPUTS)
            chosen = torch.rand(tokens, EXPERTS).topk(EACH).indices.int()
        pairs = replace(sort_by_expert(chosen, EXPERTS, rows), metadata_ready=ready)
        torch.cuda.synchronize()  # ready
        got = weights[0].run(x, scales, workspace, torch.float32, pairs)
        source = torch.arange(tokens * EACH, device="cuda") // (1 if by_pair else EACH)
        owners, alone = chosen.flatten(), torch.zeros_like(got)
        wanted = torch.zeros_like(got).double()
        for e in range(EXPERTS):
            own = source[owners == e]
            if len(own):
                part = None if scales is None else scales[own]
                wanted[owners == e] = plain[e](plain_rows(x[own], part))
                alone[owners == e] = weights[e].run(x[own], part, workspace, torch.float32)
        if family in EXACT:
            assert torch.equal(got, alone), family
        for found in (got, alone):
            errors = (found - wanted).norm(dim=1) / wanted.norm(dim=1)
            assert errors.max() < 4e-3, family
        assert not workspace.arrivals.any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "rows"), [(1, 16), (64, 32), (512, 128)])
def test_mxfp4_weights_are_multiplied_exactly(dtype, tokens, rows):
    """Of 2880 inputs, the subnormal 0.5 among elements: only sums and the result are rounded."""
    from kernels.triton.common import Workspace
    from kernels.triton.experts import sort_by_expert
    from tests.kernels.expert_cases import make_weights

    torch.manual_seed(0)
    workspace = Workspace.on("cuda")
    with torch.device("cuda"):
        weights, plain = make_weights("mxfp4", 8, 768, 2880, dtype)
        x = torch.randn(tokens, 2880).to(dtype)
        chosen = torch.rand(tokens, 8).topk(2).indices.int()
    pairs = sort_by_expert(chosen, 8, rows)
    got = weights[0].run(x, None, workspace, torch.float32, pairs)
    owners, source = chosen.flatten(), torch.arange(2 * tokens, device="cuda") // 2
    wanted = torch.zeros_like(got).double()
    for e in range(8):
        wanted[owners == e] = plain[e](x[source[owners == e]].double())
    assert (got - wanted).norm() < 1e-5 * wanted.norm()
