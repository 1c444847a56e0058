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
    from kernels.triton.experts.sorting import sort_by_expert
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
