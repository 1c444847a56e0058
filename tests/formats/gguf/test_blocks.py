"""Blocks are those of ggml: unpacked they are what the package `gguf` dequantizes, bit for bit."""

import gguf
import numpy as np
import pytest
import torch

from formats.gguf.blocks import (
    INT4,
    INT4_FLOAT,
    INT8,
    INT8_FINE,
    INT8_FLOAT,
    INT8_FLOAT_FINE,
    MINIMA,
    SYMMETRIC,
    has_negative_scales,
    packed,
    scheme_of,
    unpacked,
)
from kernels.numerics import dequantize

ROWS, COLUMNS = 24, 512


def written(kind: str) -> np.ndarray:
    """Random blocks of a type: any bytes behind a scale of either sign."""
    generator = np.random.default_rng(0)
    count, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = generator.integers(0, 256, (ROWS, COLUMNS // count, size), dtype=np.uint8)
    scales, minima = generator.normal(0, 0.1, (2, ROWS, COLUMNS // count, 1)).astype(np.float16)
    if kind == "Q8_0":
        scales = np.abs(scales)  # -128 has no opposite
    if kind in MINIMA:
        blocks[..., 2:4] = minima.view(np.uint8)
    place = slice(208, 210) if kind == "Q6_K" else slice(0, 2)
    blocks[..., place] = scales.view(np.uint8)
    blocks[0, 0, place] = 0  # a block of zeros
    return blocks.reshape(ROWS, -1)


CASES = [("Q8_0", INT8), ("Q4_0", INT8), ("Q5_0", INT8), ("IQ4_NL", INT8), ("Q4_0", INT4)]
CASES += [("Q6_K", INT8_FINE), ("Q8_0", INT8_FINE), ("Q5_0", INT8_FINE)]


@pytest.mark.parametrize(("kind", "scheme"), CASES)
def test_unpacked_is_what_gguf_dequantizes(kind, scheme):
    data = written(kind)
    weight = unpacked(kind, data, scheme)
    assert weight.q.shape == (ROWS, COLUMNS)
    assert (weight.scale > 0).all()
    found = dequantize(weight.q, weight.scale, weight.zero_point, scheme.weights.block)
    wanted = torch.from_numpy(gguf.dequantize(data, gguf.GGMLQuantizationType[kind]))
    first = 256 if kind == "Q6_K" else 32  # weights of zeros with any scale
    assert torch.equal(found[1:], wanted[1:])
    assert torch.equal(found[0, first:], wanted[0, first:])


FLOAT_ZEROS = [(kind, INT8_FLOAT) for kind in ("Q8_0", "Q4_0", "Q5_0", "IQ4_NL", *sorted(MINIMA))]
FLOAT_ZEROS += [(kind, INT4_FLOAT) for kind in ("Q4_0", "Q4_1", "Q4_K")]
FLOAT_ZEROS += [(kind, INT8_FLOAT_FINE) for kind in ("Q6_K", "Q4_K", "Q5_0")]


@pytest.mark.parametrize(("kind", "scheme"), FLOAT_ZEROS)
def test_minima_are_zero_points_but_for_the_rounding_of_fp32(kind, scheme):
    data = written(kind)
    weight = unpacked(kind, data, scheme)
    assert (weight.scale > 0).all()
    assert scheme != INT4_FLOAT or (weight.q >= -8).all() & (weight.q <= 7).all()
    size = scheme.weights.group_size
    found = dequantize(weight.q, weight.scale, weight.zero_point, scheme.weights.block)
    wanted = torch.from_numpy(gguf.dequantize(data, gguf.GGMLQuantizationType[kind]))
    rounding = 2.0**-22 * weight.scale * (16 + weight.zero_point.abs())
    first = 0 if kind in MINIMA else 256 if kind == "Q6_K" else 32  # other zeros have any scale
    error = (found - wanted).abs() / rounding.repeat_interleave(size, dim=1)
    assert error.flatten()[first:].max() <= 1


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_packing_is_the_inverse(kind):
    data = written(kind)
    data[0, :2] = data[0, 34:36]  # a scale of zero is not kept
    scheme = INT8 if kind == "Q8_0" else INT4
    assert np.array_equal(packed(kind, unpacked(kind, data, scheme)), data)


def test_blocks_with_minima_that_fp16_holds_are_packed_back():
    data = written("Q4_1").reshape(ROWS, -1, 20)
    data[..., 1] &= 0x7F  # llama.cpp writes no negative scale
    data[0, 0, 4:] = 0  # nor integers of a block with one value
    data = data.reshape(ROWS, -1)
    assert np.array_equal(packed("Q4_1", unpacked("Q4_1", data, INT4_FLOAT)), data)
    with pytest.raises(ValueError, match="none of fp16"):
        packed("Q4_1", unpacked("Q4_K", written("Q4_K"), INT4_FLOAT))


def test_zero_points_and_larger_groups_are_packed():
    generator = torch.Generator().manual_seed(0)
    q = torch.randint(-8, 8, (ROWS, 128), generator=generator).to(torch.int8)
    zeros = torch.randint(-8, 8, (ROWS, 2), generator=generator).to(torch.int8)
    scale = torch.rand(ROWS, 2, generator=generator).half().float() + 0.5
    scale = scale.half().float()
    weight = type(unpacked("Q4_0", written("Q4_0"), INT4))(q, scale, zeros)
    found = gguf.dequantize(packed("Q4_1", weight), gguf.GGMLQuantizationType.Q4_1)
    wanted = dequantize(q, scale, zeros, (1, 64))
    torch.testing.assert_close(torch.from_numpy(found), wanted, atol=8e-3, rtol=1e-3)  # m in fp16
    with pytest.raises(ValueError, match="no zero points"):
        packed("Q4_0", weight)
    with pytest.raises(ValueError, match="too large for fp16"):
        packed("Q8_0", type(weight)(q, scale * 1e5))


def test_layers_that_run_as_one_are_stored_alike():
    assert scheme_of(["Q4_0", "Q4_0"]) == INT4
    assert scheme_of(["Q4_0"], signed=False) == SYMMETRIC
    assert has_negative_scales("Q4_0", written("Q4_0"))
    assert not has_negative_scales("Q8_0", written("Q8_0"))
    assert scheme_of(["Q4_0", "Q8_0", "Q5_0"]) == INT8
    assert scheme_of(["Q4_0", "Q6_K"]) == INT8_FINE
    assert scheme_of(["Q4_K", "Q6_K"]) == INT8_FLOAT_FINE
    assert scheme_of(["Q4_0", "Q3_K"]) is None
    assert scheme_of(["Q4_1", "Q4_K", "Q4_0"]) == INT4_FLOAT
    assert scheme_of(["Q4_K", "Q5_0", "Q8_0"]) == INT8_FLOAT
