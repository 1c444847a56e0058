"""Tokens that stand out are found as transformers' own code shows them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from calibrate.sinks import OUTLIER, SMALL, Peaks, find_peaks
from calibrate.workers import BlockWorkers
from tests.calibrate.test_stream import open_stream
from tests.ptq.quantizing import edit_model
from tests.tiny_families import DEEPSEEK

FIRST = 7  # the token that stands first in every sequence
V = "model.layers.0.self_attn.v_proj.weight"


def sequences() -> list[torch.Tensor]:
    ids = torch.randint(8, 384, (6, 40), generator=torch.Generator().manual_seed(0))
    ids[:, 0] = FIRST
    return list(ids)


def peaks_of(folder: Path, *, by_values: bool = True) -> Peaks:
    stream = open_stream(folder)
    return find_peaks(stream, sequences(), BlockWorkers([stream.device]), by_values=by_values)


def silence(tensors: dict[str, torch.Tensor]) -> None:
    """Let the first token be known by a channel, of which the values of a block are nearly none."""
    embedding = tensors["model.embed_tokens.weight"]
    embedding[:, 0] = 0
    embedding[FIRST, 0] = 40 * embedding.float().abs().max().to(embedding.dtype)
    tensors[V][:, 0] *= 0.01


def test_a_token_of_small_values_is_a_sink_whatever_its_inputs_are(tiny_llama, tmp_path):
    folder = edit_model(tiny_llama, tmp_path / "model", silence)
    found = peaks_of(folder)
    assert found.sinks == 1
    assert found.ratios.max() < OUTLIER
    assert found.others(1) == {}
    assert (found.values[:, 0] < SMALL).all()
    assert (found.values[:, 1:] > SMALL).all()
    assert peaks_of(tiny_llama).sinks == 0
    assert peaks_of(folder, by_values=False).sinks == 0


def test_values_are_those_of_transformers(tiny_llama, tmp_path):
    folder = edit_model(tiny_llama, tmp_path / "model", silence)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    norms: list[list[torch.Tensor]] = [[] for _ in model.model.layers]
    for layer, own in zip(model.model.layers, norms, strict=True):
        layer.self_attn.v_proj.register_forward_hook(
            lambda _, __, v, own=own: own.append(v[0].norm(dim=-1))
        )
    with torch.no_grad():
        for ids in sequences():
            model(ids[None])
    layers = [torch.stack(own) for own in norms]
    least = torch.stack([own / own.median() for own in layers]).amin(0)
    torch.testing.assert_close(peaks_of(folder).values, least.clamp(max=1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["v2", "v3"])
def test_a_latent_stands_for_values(make_model, kind):
    family, overrides = DEEPSEEK[kind]
    assert peaks_of(make_model(family, **overrides)).sinks == 0
