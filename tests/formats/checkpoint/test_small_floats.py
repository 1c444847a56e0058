"""NVFP4, MXFP4 and MXFP8 checkpoints: what compressed-tensors' own decompression gives."""

import pytest
import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme

from formats.checkpoint.compressed_tensors import quantization_config, read_groups
from formats.errors import CheckpointError
from formats.foreign.gptq import refuse_gptq
from formats.scheme import PRESETS, WeightSpec
from formats.stored.weights import (
    StoredWeight,
    join_weights,
    read_weights,
    storage_format,
    weight_tensors,
)
from kernels.numerics import dequantize
from ptq.methods.common.rounding import round_weight

FORMATS = {"nvfp4": "NVFP4A16", "mxfp4": "MXFP4A16", "mxfp8": "MXFP8A16"}


def rounded(preset: str, rows: int = 24, columns: int = 64) -> tuple[WeightSpec, StoredWeight]:
    """A weight with groups of very different sizes, one of them zeros, rounded to nearest."""
    spec = PRESETS[preset].weights
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(rows, columns, generator=generator)
    weight *= torch.logspace(-3, 1, rows).unsqueeze(1)
    weight[3, :32] = 0
    return spec, round_weight(weight, spec, torch.float32, "mse")


@pytest.mark.parametrize("preset", FORMATS)
def test_compressed_tensors_reads_the_same_weights(preset):
    spec, weight = rounded(preset)
    scheme = PRESETS[preset].of_layers
    theirs = preset_name_to_scheme(FORMATS[preset], ["Linear"])
    compressor = BaseCompressor.get_value_from_registry(storage_format(scheme))
    tensors = weight_tensors(scheme, weight, torch.bfloat16)
    found = compressor.decompress(tensors, theirs)["weight"]
    wanted = dequantize(weight.q, weight.scale, block=spec.block)
    assert torch.equal(found.float(), wanted.to(found.dtype).float())


@pytest.mark.parametrize("preset", FORMATS)
def test_what_is_written_is_read_back(preset):
    weight = rounded(preset)[1]
    scheme = PRESETS[preset].of_layers
    tensors = weight_tensors(scheme, weight, torch.bfloat16)
    read = read_weights(scheme, [tuple(weight.q.shape)], tensors.__getitem__)
    assert torch.equal(read.q.view(torch.uint8), weight.q.view(torch.uint8))
    assert torch.equal(read.scale, weight.scale)


def test_layers_read_as_one_keep_their_own_global_scales():
    scheme, parts = PRESETS["nvfp4"].of_layers, [rounded("nvfp4", rows)[1] for rows in (8, 24)]
    stored = [weight_tensors(scheme, part, torch.bfloat16) for part in parts]
    joined = read_weights(
        scheme, [(8, 64), (24, 64)], lambda leaf: torch.cat([tensors[leaf] for tensors in stored])
    )
    assert torch.equal(joined.scale, join_weights(parts).scale)
    assert joined.unit.shape == (32, 1)


@pytest.mark.parametrize("preset", FORMATS)
def test_config_is_that_of_compressed_tensors(preset):
    config = quantization_config(PRESETS[preset], [])
    group = config["config_groups"]["group_0"]
    ours = QuantizationScheme.model_validate(group).weights
    theirs = preset_name_to_scheme(FORMATS[preset], ["Linear"]).weights
    assert ours == theirs
    assert group["format"] == storage_format(PRESETS[preset].of_layers)
    assert read_groups(config) == ((("Linear",), PRESETS[preset].of_layers),)


def test_a_zero_global_scale_is_refused():
    scheme, weight = PRESETS["nvfp4"].of_layers, rounded("nvfp4")[1]
    tensors = weight_tensors(scheme, weight, torch.bfloat16)
    tensors["weight_global_scale"] = torch.zeros(1)
    with pytest.raises(CheckpointError, match="weight_global_scale"):
        read_weights(scheme, [tuple(weight.q.shape)], tensors.__getitem__)


@pytest.mark.parametrize(
    ("dtype", "size", "message"),
    [
        ("fp4_e2m1", 64, "group_size: 16 or 32"),
        ("fp8_e4m3", 128, "group_size: 32"),
        ("int4", 16, "group_size: 32, 64 or 128"),
    ],
)
def test_other_group_sizes_are_refused(dtype, size, message):
    with pytest.raises(ValueError, match=message):
        WeightSpec(dtype=dtype, granularity="group", group_size=size)


@pytest.mark.parametrize("preset", FORMATS)
def test_layouts_of_integers_refuse_them(preset):
    with pytest.raises(CheckpointError, match=PRESETS[preset].weights.dtype):
        refuse_gptq(PRESETS[preset])
