"""NVFP4 and MXFP4 weights on a GPU: within bounds of fp64, from one row to many, same bits."""

from __future__ import annotations

import pytest
import torch

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.usefixtures("poison"),
]
if torch.cuda.is_available():
    from kernels.bench.case import draw_weight, relative
    from kernels.bench.gpu_cases import pack
    from kernels.bench.shapes import Gemm
    from kernels.triton.tuning import Tile

# A row, rows that are cut among programs, and on sm_90 many rows: cut tiles, and whole ones.
SHAPES = ((1, 512, 1408), (40, 192, 256), (300, 1024, 2048), (1100, 9216, 256))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("family", ["w4a16_nvfp4", "w4a16_mxfp4"])
def test_products_equal_those_of_fp64(family, dtype, workspace):
    for rows, outputs, inputs in SHAPES if dtype == torch.bfloat16 else SHAPES[::3]:
        shape = Gemm.of(family, rows, outputs, inputs, str(dtype)[6:])
        numbers = draw_weight(shape, "cuda")
        weight, x = pack(shape, numbers), torch.randn(rows, inputs, device="cuda").to(dtype)
        wanted = numbers.product(x, None)
        for tile in (None, Tile(64, 16, 2, 3)) if rows == 1 else (None,):
            got = weight.run(x, None, workspace, dtype, tile=tile)
            bound = 1e-3 if dtype == torch.float16 else 4e-3
            assert relative(got, wanted) < bound, (rows, tile)
            assert torch.equal(got, weight.run(x, None, workspace, dtype, tile=tile))
            assert not workspace.arrivals.any()


@pytest.mark.parametrize("family", ["w4a16_nvfp4", "w4a16_mxfp4"])
def test_a_row_of_the_identity_gives_the_weights_exactly(family, workspace):
    """Weights times scales are exact, and so is what comes of them in fp32."""
    shape = Gemm.of(family, 128, 256, 128)
    numbers = draw_weight(shape, "cuda")
    x = torch.eye(128, device="cuda", dtype=torch.bfloat16)
    wanted = numbers.product(x, None).float()
    for rows in (16, 128):
        got = pack(shape, numbers).run(
            x[:rows].contiguous(), None, workspace, torch.float32, tile=Tile(64, 16)
        )
        assert torch.equal(got, wanted[:rows])
