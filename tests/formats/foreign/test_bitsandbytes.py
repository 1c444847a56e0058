"""bitsandbytes' layouts: bytes worked out by hand, damage, and the library itself where it is."""

import json

import pytest
import torch
from torch import Tensor

from formats.foreign.bitsandbytes import (
    dequantize_four_bit,
    four_bit_layout,
    read_bitsandbytes_config,
    unpack_int8,
)
from formats.scheme import PRESETS, Scheme
from tests.refusals import refused_checkpoint as refused

STATE = "weight.quant_state.bitsandbytes__nf4"
INT8 = {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}
NF4 = {
    "quant_method": "bitsandbytes",
    "load_in_8bit": False,
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": False,
    "bnb_4bit_quant_storage": "uint8",
}


def int8_tensors() -> dict[str, Tensor]:
    return {
        "weight": torch.tensor([[127, -127, 0], [1, 2, -3], [0, 0, 0]], dtype=torch.int8),
        "SCB": torch.tensor([127.0, 63.5, 0.0]),
        "weight_format": torch.tensor(0, dtype=torch.uint8),
    }


def state(**change) -> Tensor:
    """A state of a 2 x 3 weight, as bytes."""
    values = {"quant_type": "nf4", "blocksize": 4, "dtype": "float32", "shape": [2, 3]} | change
    return torch.tensor(list(json.dumps(values).encode()), dtype=torch.uint8)


def nf4_tensors() -> dict[str, Tensor]:
    """Codes 0 1 15 | 8 7 2 of values -8 -7 ... 7, in blocks of 4 with magnitudes 1 and 10."""
    return {
        "weight": torch.tensor([[0x01], [0xF8], [0x72]], dtype=torch.uint8),
        "weight.absmax": torch.tensor([1.0, 10.0]),
        "weight.quant_map": torch.arange(-8.0, 8.0),
        STATE: state(),
    }


def nested_tensors() -> dict[str, Tensor]:
    """The same, with magnitudes 1 = 0.5 * 2 + 0 and 10 = 5 * 2 + 0, in nested blocks of 2."""
    values = torch.zeros(256)
    values[[3, 200]] = torch.tensor([0.25, 4.75])
    nested = {"nested_blocksize": 2, "nested_dtype": "float32", "nested_offset": 0.5}
    return nf4_tensors() | {
        "weight.absmax": torch.tensor([3, 200], dtype=torch.uint8),
        "weight.nested_absmax": torch.tensor([2.0]),
        "weight.nested_quant_map": values,
        STATE: state(**nested),
    }


WANTED = torch.tensor([[-8.0, -7.0, 7.0], [0.0, -10.0, -60.0]])


def test_golden_int8():
    weight = unpack_int8(int8_tensors())
    assert weight.q.tolist() == [[127, -127, 0], [1, 2, -3], [0, 0, 0]]
    assert weight.scale.tolist() == [[1.0], [0.5], [1.0]]
    assert weight.zero_point is None


@pytest.mark.parametrize("tensors", [nf4_tensors(), nested_tensors()])
def test_golden_nf4(tensors):
    assert torch.equal(dequantize_four_bit(tensors, "nf4"), WANTED)


def test_the_storage_type_is_only_another_name_of_the_bytes():
    tensors = nf4_tensors() | {STATE: state(shape=[2, 4])}
    tensors["weight"] = torch.tensor([[0x01], [0xF8], [0x72], [0x08]], dtype=torch.uint8)
    plain = dequantize_four_bit(tensors, "nf4")
    tensors["weight"] = tensors["weight"].reshape(-1).view(torch.bfloat16).reshape(-1, 1)
    assert torch.equal(dequantize_four_bit(tensors, "nf4"), plain)
    assert plain[1].tolist() == [-10.0, -60.0, -80.0, 0.0]


def test_configs():
    scheme, layout = read_bitsandbytes_config(INT8)
    assert scheme == PRESETS["w8"]
    assert layout.leaves == ("weight", "SCB", "weight_format")
    scheme, layout = read_bitsandbytes_config(NF4)
    assert scheme == Scheme()
    assert layout.unpack is None
    assert layout.leaves == ("weight", "weight.absmax", "weight.quant_map", STATE)
    assert set(four_bit_layout("fp4", True).leaves) - set(four_bit_layout("fp4", False).leaves) == {
        "weight.nested_absmax",
        "weight.nested_quant_map",
    }


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (INT8 | {"load_in_8bit": False}, "load_in_8bit False; allowed: True"),
        (NF4 | {"load_in_8bit": True}, "load_in_8bit True; allowed: False, absent"),
        (NF4 | {"bnb_4bit_quant_type": "nf3"}, "bnb_4bit_quant_type 'nf3'; allowed: 'nf4', 'fp4'"),
        (NF4 | {"bnb_4bit_use_double_quant": None}, "bnb_4bit_use_double_quant absent"),
        (NF4 | {"bnb_4bit_quant_storage": "int3"}, "bnb_4bit_quant_storage 'int3'"),
    ],
)
def test_other_settings_are_refused(config, message):
    refused(message, read_bitsandbytes_config, config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"SCB": torch.ones(2)}, r"SCB is torch.float32 \(2,\); needed is torch.float32 \(3,\)"),
        ({"SCB": torch.tensor([1.0, -2.0, 0.0])}, "SCB holds -2.0"),
        ({"SCB": torch.tensor([1.0, torch.nan, 0.0])}, "SCB holds NaN or infinity"),
        ({"SCB": torch.tensor([1.0, 0.0, 0.0])}, "SCB is 0 for a row that is not zero"),
        ({"weight_format": torch.tensor(1, dtype=torch.uint8)}, "weight_format is not 0"),
        ({"weight": torch.ones(3, 3)}, "weight is torch.float32"),
    ],
)
def test_damaged_int8_is_refused(change, message):
    refused(message, unpack_int8, int8_tensors() | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({STATE: state()[:30]}, f"{STATE}: its JSON: "),
        ({STATE: state(quant_type="nf3")}, f"{STATE}: quant_type: "),
        ({STATE: state(quant_type="fp4")}, f"{STATE} says quant_type fp4"),
        ({STATE: state(shape=[2])}, f"{STATE}: shape.1: "),
        ({STATE: state(shape=[2, -3])}, f"{STATE}: shape.1: "),
        ({STATE: state(blocksize=0)}, f"{STATE}: blocksize: "),
        ({STATE: state(other=1)}, f"{STATE}: other: "),
        ({STATE: state().float()}, f"{STATE} is missing or not of type uint8"),
        ({STATE: state(shape=[2, 5])}, r"weight.absmax is torch.float32 \(2,\); .* \(3,\)"),
        (
            {STATE: state(shape=[1, 8])},
            "weight has 3 bytes; needed for 1 x 8 codes of 4 bits are 4",
        ),
        ({"weight.absmax": torch.tensor([1.0, -1.0])}, "weight.absmax holds -1.0"),
        ({"weight.absmax": torch.tensor([1.0, torch.inf])}, "weight.absmax holds NaN or infinity"),
        ({"weight.quant_map": torch.ones(15)}, "weight.quant_map is .* needed .* \\(16,\\)"),
        ({"weight.quant_map": torch.full((16,), torch.nan)}, "weight.quant_map holds NaN"),
    ],
)
def test_damaged_nf4_is_refused(change, message):
    refused(message, dequantize_four_bit, nf4_tensors() | change, "nf4")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({STATE: state()}, "no nested_blocksize or nested_offset"),
        ({"weight.absmax": torch.ones(2)}, "weight.absmax is torch.float32 .* torch.uint8"),
        ({"weight.nested_absmax": torch.ones(2)}, r"weight.nested_absmax is .* needed .* \(1,\)"),
        ({"weight.nested_quant_map": torch.ones(16)}, r"weight.nested_quant_map .* \(256,\)"),
        ({"weight.nested_absmax": torch.tensor([-1.0])}, "weight.nested_absmax holds -1.0"),
    ],
)
def test_damaged_nested_magnitudes_are_refused(change, message):
    refused(message, dequantize_four_bit, nested_tensors() | change, "nf4")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("shape", [(96, 100), (6, 50), (640, 64)])
def test_four_bits_are_those_of_the_library(dtype, quant_type, nested, shape):
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight.view(-1)[:60] = 0
    packed, theirs = functional.quantize_4bit(
        weight, quant_type=quant_type, compress_statistics=nested, blocksize=64
    )
    tensors = {"weight": packed} | {
        f"weight.{name}": tensor for name, tensor in theirs.as_dict(packed=True).items()
    }
    assert tensors.keys() == set(four_bit_layout(quant_type, nested).leaves)
    ours = dequantize_four_bit(tensors, quant_type).to(dtype)
    assert torch.equal(ours, functional.dequantize_4bit(packed, theirs))


def test_int8_is_that_of_the_library():
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    weight[5] = 0
    q, largest, _ = functional.int8_vectorwise_quant(weight.half())
    tensors = {"weight": q, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    ours = unpack_int8(tensors)
    assert torch.equal(ours.q, q)
    theirs = functional.int8_vectorwise_dequant(q, largest)  # multiplies by a rounded 1 / 127
    torch.testing.assert_close(ours.q * ours.scale, theirs, rtol=2**-22, atol=0)
