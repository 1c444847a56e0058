"""What neural-compressor's `huggingface` format has other than GPTQ, worked out by hand."""

import struct

import pytest
import torch
from torch import Tensor

from formats.errors import CheckpointError
from formats.foreign.neural_compressor import (
    is_neural_compressor,
    neural_compressor_layout,
    refuse_pickle,
)
from formats.scheme import Scheme, WeightSpec
from formats.stored.weights import weight_tensors
from tests.refusals import refused_checkpoint as refused

SPEC = WeightSpec(dtype="int4", granularity="group", group_size=32, symmetric=False)
NAMES = ("a.qweight", "a.qzeros", "a.scales", "a.scale_bf16_to_fp8", "a.bias", "norm.weight")


def word(nibbles: list[int]) -> int:
    """The int32 whose lowest four bits are the first nibble."""
    value = sum(nibble << (4 * i) for i, nibble in enumerate(nibbles))
    return struct.unpack("<i", struct.pack("<I", value))[0]


def tensors() -> dict[str, Tensor]:
    """8 outputs of 64 inputs in 2 groups: output n holds n, from zero point 8 and from n."""
    column = [word([n] * 8) for n in range(8)]
    zeros = [word([7] * 8), word([15, 0, 1, 2, 3, 4, 5, 6])]  # less one, 0 as 15
    return {
        "qweight": torch.tensor([column] * 8, dtype=torch.int32),
        "qzeros": torch.tensor(zeros, dtype=torch.int32)[:, None],
        "scales": torch.tensor([[0.5] * 8, [2.0] * 8], dtype=torch.float16),
        "scale_bf16_to_fp8": torch.zeros(1, dtype=torch.bfloat16),
    }


def layout(names=NAMES, **config):
    return neural_compressor_layout(SPEC, {"desc_act": False} | config, names)


def test_golden_words():
    found = layout()
    assert found.leaves == ("qweight", "qzeros", "scales", "scale_bf16_to_fp8")
    assert found.zero_word == word([7] * 8)
    weight = found.unpack(tensors())
    assert weight.q.tolist() == [[n - 8] * 64 for n in range(8)]
    assert weight.zero_point.tolist() == [[0, n - 8] for n in range(8)]
    assert weight.scale.tolist() == [[0.5, 2.0]] * 8
    values = found.values(tensors())
    assert values.tolist() == [[(n - 8) * 0.5] * 32 + [0.0] * 32 for n in range(8)]


def test_act_order_gives_values_and_a_weight_with_its_order():
    found = layout((*NAMES, "a.g_idx"), desc_act=True)
    assert "g_idx" in found.leaves
    turned = tensors() | {"g_idx": (torch.arange(64) % 2).int()}
    assert found.values(turned)[1].tolist() == [-3.5, 0.0] * 32
    weight = found.unpack(turned)
    assert weight.order.tolist() == [[*range(0, 64, 2), *range(1, 64, 2)]]
    with pytest.raises(CheckpointError, match="g_idx is not sorted"):  # in no layout but its own
        weight_tensors(Scheme(weights=SPEC), weight, torch.float16)


def test_whose_names_they_are():
    gptq = ("a.qweight", "a.qzeros", "a.scales", "a.g_idx")
    assert is_neural_compressor(NAMES)
    assert is_neural_compressor((*gptq, "a.scale_bf16_to_fp8"))
    assert is_neural_compressor(gptq[:3])  # before it had that tensor
    assert not is_neural_compressor(gptq)


@pytest.mark.parametrize(
    ("names", "config", "message"),
    [
        (("a.qweight", "a.scales"), {}, "a.qweight has no qzeros .* nf4, fp4 or own packing"),
        ((*NAMES, "a.input_scale"), {}, "a.input_scale: inputs are multiplied .*folding=True"),
        (NAMES, {"desc_act": True}, "desc_act True, but there is no g_idx"),
    ],
)
def test_what_is_not_read_is_refused(names, config, message):
    refused(message, layout, names, **config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale_bf16_to_fp8": torch.ones(1, dtype=torch.bfloat16)}, "activations run in fp8"),
        ({"scale_bf16_to_fp8": torch.ones(2)}, "scale_bf16_to_fp8 is torch.float32"),
        ({"qzeros": torch.zeros(1, 1, dtype=torch.int32)}, "qzeros is"),
        ({"scales": torch.zeros(2, 8).half()}, "scales holds 0.0"),
    ],
)
def test_damaged_tensors_are_refused(change, message):
    refused(message, layout().unpack, tensors() | change)


def test_the_pickle_is_refused_unread(tmp_path):
    for name in ("qconfig.json", "quantized_weight.pt"):
        refuse_pickle(tmp_path)
        (tmp_path / name).write_text("not read")
    refused('is a pickle.*format="huggingface"', refuse_pickle, tmp_path)
