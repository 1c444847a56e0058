"""Linear layers of NVFP4 and MXFP4 without a GPU: sums, packed bits, what is compiled."""

import pytest
import torch

from kernels.triton.common import Workspace
from kernels.triton.linear.fp4 import fits_fp4, pack_fp4
from kernels.triton.linear.fp4_operands import ROTATIONS, TARGETS, pack_codes
from kernels.triton.tuning import Tile
from tests.kernels.expert_cases import E2M1
from tests.kernels.triton_lab import SHARED, assembler_says, building_for, compiled, interpreted


def draw(group: int, outputs: int, inputs: int):
    """Codes, scales, unit and the weight [outputs, inputs] in fp64; no unit of powers of two."""
    torch.manual_seed(group)
    codes = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8)
    if group == 16:
        unit = torch.full((outputs, 1), 1 / 300.0)  # as others' global scales, no power of two
        multiples = torch.randint(1, 0x7F, (outputs, inputs // 16), dtype=torch.uint8)
        multiples[0, 0] = 0x7E
        scale = multiples.view(torch.float8_e4m3fn).float() * unit
    else:
        unit = None
        scale = 2.0 ** torch.randint(-12, -3, (outputs, inputs // 32)).float()
    weight = E2M1[codes.int()].double() * scale.double().repeat_interleave(group, 1)
    return codes, scale, unit, weight


@pytest.mark.parametrize(
    ("group", "rows", "inputs", "splits"), [(16, 3, 256, 1), (16, 17, 160, 1), (32, 5, 384, 2)]
)
@interpreted
def test_sums_are_those_of_the_weights(group, rows, inputs, splits):
    codes, scale, unit, weight = draw(group, 128, inputs)
    bias, x = torch.randn(128), torch.randn(rows, inputs).half()
    packed = pack_fp4(codes, scale, bias, torch.float16, unit)
    tile, workspace = Tile(64, 32, splits, 2), Workspace.on("cpu", 1 << 18, 64)
    got = packed.run(x, None, workspace, torch.float32, tile=tile)
    wanted = x.double() @ weight.T + bias.double()
    torch.testing.assert_close(got.double(), wanted, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_bits_lie_where_instructions_look_for_them(dtype):
    """Each pair, by rotations and masks alone, is the float of what elements lack, times them."""
    codes = torch.randint(0, 16, (64, 128), dtype=torch.uint8)
    words = pack_codes(codes, dtype).view(2, 4, 8, 4, 4).permute(1, 0, 2, 4, 3).reshape(64, 16)
    words = words.to(torch.int64) & 0xFFFFFFFF
    lack = 2.0**126 if dtype == torch.bfloat16 else 2.0**14
    for j in range(4):
        both = torch.zeros_like(words)
        for rotation, bit in zip(ROTATIONS[dtype][j], TARGETS[dtype], strict=True):
            turned = (words >> rotation | words << (32 - rotation)) & 0xFFFFFFFF
            both |= turned & (0x00010001 << bit)
        for half in (0, 1):
            bits = (both >> (16 * half) & 0xFFFF).to(torch.int32)
            found = (bits - ((bits >> 15) << 16)).to(torch.int16).view(dtype).double() * lack
            own = codes.view(64, 4, 16, 2)[:, j, :, half]
            assert torch.equal(found, E2M1[own.int()].double())


@pytest.mark.parametrize("group", [16, 32])
def test_weights_that_lose_nothing_are_taken(group):
    codes, scale, unit, _ = draw(group, 64, 128)
    assert fits_fp4(codes, scale, torch.bfloat16, unit)
    assert not fits_fp4(codes, scale, torch.float32, unit)
    assert not fits_fp4(codes[:40], scale[:40], torch.bfloat16, unit)
    scale[0, 0] *= 1.03
    assert not fits_fp4(codes, scale, torch.bfloat16, unit)


@pytest.mark.parametrize("group", [16, 32])
@compiled
def test_weights_go_through_registers_in_few_instructions(group):
    workspace = Workspace.on("cpu", 1 << 16, 64)
    codes, scale = torch.zeros(512, 1024, dtype=torch.uint8), torch.ones(512, 1024 // group)
    unit = torch.ones(512, 1) if group == 16 else None
    with building_for(90) as built:
        for dtype, tile in (
            (torch.bfloat16, Tile(256, 16, 1, 5)),
            (torch.bfloat16, Tile(256, 128, 1, 4, 8, True)),
            (torch.float16, Tile(128, 256, 4, 5, 8, True)),
        ):
            weight = pack_fp4(codes, scale, None, dtype, unit)
            x = torch.zeros(200, 1024, dtype=dtype)
            weight.run(x, None, workspace, dtype, tile=tile)
    for few, binary in zip((True, False, False), built, strict=True):
        assert binary.stack == 0 if few else not binary.spills(predicates=8)
        assert binary.shared <= SHARED
        assert binary.count(r"wgmma\.mma_async\S*f16\.b?f16 +\{[^}]*\}, *\{"), "left in registers"
        assert not binary.count(r"mma\.sync")
        assert "serialized" not in assembler_says(binary.ptx)
