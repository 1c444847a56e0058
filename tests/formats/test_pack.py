"""Packed integers, bit by bit."""

from itertools import product
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch

from formats.cache_scheme import StateSpec
from formats.pack import pack_words, unpack_words
from formats.scheme import PRESETS, ActivationSpec, KVCacheSpec, Scheme, Strict, WeightSpec
from formats.stored.weights import StoredWeight, read_weights, weight_tensors


def test_golden_words():
    nibbles = torch.tensor([[-8, -7, 0, 7, 1, 2, 3, -1]], dtype=torch.int8)
    assert pack_words(nibbles, 4).tolist() == [[0x7BA9F810]]
    bytes_ = torch.tensor([[-128, 127, 0, -1]], dtype=torch.int8)
    assert pack_words(bytes_, 8).tolist() == [[0x7F80FF00]]
    assert pack_words(torch.full((1, 8), 7, dtype=torch.int8), 4).tolist() == [[-1]]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("columns", [1, 7, 8, 12, 64])
def test_round_trip(bits, columns):
    generator = torch.Generator().manual_seed(0)
    half = 1 << (bits - 1)
    q = torch.randint(-half, half, (5, columns), generator=generator).to(torch.int8)
    words = pack_words(q, bits)
    assert words.shape == (5, -(-columns * bits // 32))
    assert torch.equal(unpack_words(words, bits, columns), q)


@pytest.mark.parametrize("bits", [4, 8])
def test_words_are_those_of_compressed_tensors(bits):
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    generator = torch.Generator().manual_seed(0)
    half = 1 << (bits - 1)
    q = torch.randint(-half, half, (16, 64), generator=generator).to(torch.int8)
    assert torch.equal(pack_words(q, bits), helpers.pack_to_int32(q, bits))
    packed = helpers.pack_to_int32(q, bits, packed_dim=0)
    assert torch.equal(pack_words(q.T, bits).T, packed)


@pytest.mark.parametrize("layers", [(16,), (16, 20, 5)])
def test_zero_points_of_a_layer_and_of_several_that_are_read_as_one(layers):
    spec = WeightSpec(dtype="int4", granularity="group", group_size=32, symmetric=False)
    generator, weights = torch.Generator().manual_seed(0), []
    for rows in layers:  # words of zero points hold 8 rows each
        q, zeros = (
            torch.randint(-8, 8, (rows, n), generator=generator, dtype=torch.int8) for n in (64, 2)
        )
        scale = torch.rand(rows, 2, generator=generator).bfloat16().float()
        weights.append(StoredWeight(q, scale, zeros))
    scheme = Scheme(weights=spec).of_layers
    stored = [weight_tensors(scheme, weight, torch.bfloat16) for weight in weights]
    assert {name: tuple(tensor.shape) for name, tensor in stored[0].items()} == {
        "weight_packed": (16, 8),
        "weight_scale": (16, 2),
        "weight_shape": (2,),
        "weight_zero_point": (2, 2),
    }
    shapes = [tuple(weight.q.shape) for weight in weights]
    found = read_weights(scheme, shapes, lambda leaf: torch.cat([own[leaf] for own in stored]))
    assert torch.equal(found.zero_point, torch.cat([w.zero_point for w in weights]))  # pyright: ignore
    assert torch.equal(found.scale, torch.cat([weight.scale for weight in weights]))
    assert torch.equal(found.q, torch.cat([weight.q for weight in weights]))


def test_short_names_follow_the_types():
    names = {name: scheme.wac for name, scheme in PRESETS.items()}
    integers = [name for name in names if "fp8" not in name]
    assert [names[name] for name in integers] == integers
    assert names["fp8_c8"] == "af8wf8cf8"
    assert names["fp8_block"] == "af8wf8_block"
    assert names["c8_fp8"] == "cf8"
    assert Scheme().wac == "float"


def test_no_two_schemes_have_one_short_name():
    kinds = map(every, (WeightSpec, ActivationSpec, KVCacheSpec, StateSpec))
    parts = [dict(zip(Scheme.model_fields, specs, strict=True)) for specs in product(*kinds)]
    names = [scheme.wac for own in parts for scheme in allowed(Scheme, own)]
    assert len(names) > 200
    assert sorted(set(names)) == sorted(names)


def every(kind: type[Strict]) -> list[Any]:
    """All specs of a kind, and none."""
    types = [get_type_hints(kind)[name] for name in kind.model_fields]
    fields = (
        dict(zip(kind.model_fields, own, strict=True)) for own in product(*map(values, types))
    )
    specs = (spec for own in fields for spec in allowed(kind, own))
    return [None, *(spec for spec in specs if getattr(spec, "group_size", None) != "auto")]


def values(kind: Any) -> list[Any]:
    """What a field of literals, None or a truth value may be."""
    if kind is bool:
        return [True, False]
    if get_origin(kind) is Literal:
        return [value for value in get_args(kind) if value != "auto"]  # which is of no one size
    return [None] if kind is type(None) else [v for own in get_args(kind) for v in values(own)]


def allowed(kind: type[Strict], fields: dict[str, Any]) -> list[Any]:
    """What the fields make, if they go together."""
    try:
        return [kind(**fields)]
    except ValueError:
        return []
