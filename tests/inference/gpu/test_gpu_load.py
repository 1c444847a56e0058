"""How experts come onto a GPU, with the CPU in its place: by few calls, in little memory."""

import json
from collections import Counter
from dataclasses import fields
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from formats.checkpoint.read import Checkpoint
from formats.scheme import PRESETS, Scheme, WeightSpec
from inference.bench.random_model import RandomCheckpoint, random_checkpoint
from inference.bench.shapes import SHAPES
from inference.gpu.backend import TritonBackend
from inference.models import read
from inference.models.decoder import Decoder
from tests.inference.models.load_memory import TOGETHER, peaks
from tests.kernels.triton_lab import interpreted

SLACK = 8 << 20  # scales, the allocator's own, objects
ZEROS = WeightSpec(dtype="int4", granularity="group", group_size=64, symmetric=False)
OWN = {"w4_zeros": Scheme(weights=ZEROS), "w8_zeros": Scheme(weights=WeightSpec(symmetric=False))}
SCHEMES = [
    "float", "w8", "w4", "a8w8", "a8w8_dynamic", "a8w4", "a8w4_two_level", "fp8_tensor",
    "fp8_channel", "fp8_block", *OWN,
]  # fmt: skip
KINDS = ("random", "stored")


def shape_of(folder: Path, experts: int, hidden: int, inner: int, blocks: int = 1) -> str:
    """The folder of a mixture's config.json."""
    sizes = {"num_experts": experts, "num_experts_per_tok": min(8, experts)}
    sizes |= {"hidden_size": hidden, "moe_intermediate_size": inner}
    sizes |= {"num_hidden_layers": blocks, "vocab_size": 64, "max_position_embeddings": 128}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 128}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPES["qwen3-30b-a3b"] | sizes))
    return str(folder)


def opened(kind: str, folder: Path, shape: str, scheme: str) -> Checkpoint:
    if kind == "random":
        return RandomCheckpoint(shape, scheme, "cpu")
    return Checkpoint.open(random_checkpoint(folder, shape, scheme))


def tensors(layer) -> dict[str, torch.Tensor]:
    """What lies in memory of a layer, by name."""
    named = {f.name: getattr(layer.weight, f.name) for f in fields(layer.weight)}
    named |= {"input_scale": layer.rows.scale}
    return {key: value for key, value in named.items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize("inner", [128, 192])  # of the second, blocks of 128 and tiles have a rest
@pytest.mark.parametrize("scheme", SCHEMES)
@interpreted
def test_the_bytes_are_those_of_experts_one_by_one(tmp_path, scheme, inner):
    device = torch.device("cpu")
    with pytest.MonkeyPatch.context() as patch, mock.patch.dict(PRESETS, OWN):
        checkpoint = opened("stored", tmp_path, shape_of(tmp_path, 5, 256, inner), scheme)
        for leaves, size in (
            (("gate_proj", "up_proj"), 512 * inner),
            (("down_proj",), 256 * inner),
        ):
            names = [[f"model.layers.0.mlp.experts.{i}.{x}" for x in leaves] for i in range(5)]
            own = TritonBackend(device, torch.float16)
            wanted = [own.linear(read.read_linear(checkpoint, m, device)) for m in names]
            for together in (1, 2 * size, 5 * size):  # in parts of 1, 2 and 5
                patch.setattr(read, "TOGETHER", together)
                stacks = list(read.read_stacks(checkpoint, names, device))
                assert len(stacks) == -(-5 * size // together) or together == 1
                found = own.experts(iter(stacks), 5).each
                assert len(found) == len(wanted)
                for one, other in zip(found, wanted, strict=True):
                    assert type(one.weight) is type(other.weight)
                    assert one.rows.dtype == other.rows.dtype
                    equal(tensors(one), tensors(other))


def equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        one, other = found[name], tensor
        assert (one.dtype, one.shape) == (other.dtype, other.shape), name
        one, other = (t.contiguous().flatten().view(torch.uint8) for t in (one, other))
        assert torch.equal(one, other), name


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", KINDS)
@interpreted
def test_more_experts_take_no_more_calls(tmp_path, scheme, kind):
    counts = []
    with mock.patch.dict(PRESETS, OWN):
        for experts in (4, 12):
            shape = shape_of(tmp_path / str(experts), experts, 256, 128)
            checkpoint = opened(kind, tmp_path, shape, scheme)
            with Calls() as calls:
                Decoder(checkpoint, TritonBackend(torch.device("cpu"), torch.float16))
            counts.append(calls.made)
    more = counts[1] - counts[0]
    assert sum(more.values()) <= 8, more


class Calls(TorchDispatchMode):
    """Counts calls of torch by what they do."""

    made: Counter[str]

    def __enter__(self):
        self.made = Counter()
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.made[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads peaks from /proc")
def test_no_more_than_some_experts_are_held_beside_the_packed_ones(tmp_path):
    paths = [random_checkpoint(tmp_path, shape_of(tmp_path, 4, 256, 128), "a8w8")]
    shape = shape_of(tmp_path, 48, 512, 512)
    schemes = ("a8w8", "a8w4", "w4", "fp8_block")
    paths += [random_checkpoint(tmp_path, shape, scheme) for scheme in schemes]
    rows = peaks("gpu", *paths)
    for scheme, (held, packed) in zip(schemes, rows, strict=True):
        beside = held - packed
        assert beside < 4 * TOGETHER + SLACK, (scheme, beside / 1e6, packed / 1e6)
