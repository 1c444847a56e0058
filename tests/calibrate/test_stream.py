"""The stream runs the model that transformers runs, one block at a time."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from calibrate.statistics import Statistics
from calibrate.stream import BlockStream
from formats.checkpoint import Checkpoint
from formats.errors import RecipeError
from tests.conftest import write_model

FAMILIES = ["llama", "qwen2", "qwen3", "mistral"]


def samples(count=6, seed=0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, 384, (n,), generator=generator) for n in range(20, 20 + 7 * count, 7)]


def open_stream(folder) -> BlockStream:
    return BlockStream(AutoConfig.from_pretrained(folder), Checkpoint.open(folder).tensor)


def collect(folder, sequences) -> Statistics:
    stream, statistics = open_stream(folder), Statistics()
    stream.start(sequences)
    for index in range(len(stream.blocks)):
        block = stream.load(index)
        for sample in range(len(sequences)):
            block.run(
                sample,
                on_input=lambda name, x: statistics.observe(name, "input", x),
                on_kv=lambda k, v, name=block.attention: (
                    statistics.observe(name, "k_cache", k),
                    statistics.observe(name, "v_cache", v),
                ),
            )
        stream.advance(block)
    return statistics


@pytest.mark.parametrize("family", FAMILIES)
def test_every_block_gives_what_the_whole_model_gives(make_model, family):
    overrides = {"sliding_window": 16} if family == "mistral" else {}
    folder = make_model(family, **overrides)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    outputs: dict[tuple[int, int], torch.Tensor] = {}
    caches = []
    sequences = samples()
    for number, ids in enumerate(sequences):
        hooks = [
            layer.register_forward_hook(
                lambda _, __, out, key=(i, number): outputs.__setitem__(key, out[0])
            )
            for i, layer in enumerate(model.model.layers)
        ]
        with torch.no_grad():
            caches.append(model(ids[None], use_cache=True).past_key_values)
        for hook in hooks:
            hook.remove()
    stream = open_stream(folder)
    stream.start(sequences)
    for index in range(2):
        block = stream.load(index)
        for number in range(len(sequences)):
            seen = []
            out = block.run(number, on_kv=lambda k, v, seen=seen: seen.extend((k, v)))
            assert torch.equal(out, outputs[index, number].view_as(out))
            if family != "mistral":  # its cache keeps the window only
                layer = caches[number].layers[index]
                assert torch.equal(seen[0], layer.keys[0].transpose(0, 1))
                assert torch.equal(seen[1], layer.values[0].transpose(0, 1))
        stream.advance(block)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_statistics_do_not_depend_on_the_order_of_samples_or_on_how_they_are_batched(
    make_model, family
):
    folder, sequences = make_model(family), samples()
    whole = collect(folder, sequences)
    assert len(whole) == 2 * (7 + 2)
    orders = ([5, 4, 3, 2, 1, 0], [2, 0, 5, 1, 4, 3], [1, 3, 5, 0, 2, 4])
    for order in orders:
        shuffled = collect(folder, [sequences[i] for i in order])
        assert all(shuffled[key] == whole[key] for key in whole)
    for size in (1, 2, 3):  # as if each batch came from another rank
        merged = Statistics()
        for begin in range(0, len(sequences), size):
            merged.merge(collect(folder, sequences[begin : begin + size]))
        assert all(merged[key] == whole[key] for key in whole)


def test_one_block_is_in_memory_at_a_time(make_model):
    folder = make_model("llama", layers=5)
    checkpoint = Checkpoint.open(folder)
    alive: list[tuple[str, weakref.ref]] = []

    def read(name):
        tensor = checkpoint.tensor(name).float()
        alive.append((name, weakref.ref(tensor)))
        return tensor

    stream = BlockStream(AutoConfig.from_pretrained(folder), read)
    stream.start(samples(2))
    for index in range(5):
        block = stream.load(index)
        gc.collect()
        held = {name.split(".")[2] for name, ref in alive if ref() is not None}
        assert held <= {str(index)}, held
        stream.advance(block)
        del block


def test_hooks_leave_nothing_behind(make_model):
    stream = open_stream(make_model("llama"))
    stream.start(samples(1))
    block = stream.load(0)
    seen = []
    block.run(0, on_input=lambda name, x: seen.append((name, x.shape)), on_kv=lambda k, v: None)
    assert {name for name, _ in seen} == set(block.linears) == set(stream.linears("model.layers.0"))
    count = len(seen)
    block.run(0)
    assert len(seen) == count


def test_an_unknown_family_is_refused(tmp_path):
    config = AutoConfig.for_model("gpt2")
    with pytest.raises(RecipeError, match="'gpt2' is not supported.*llama"):
        BlockStream(config, lambda name: torch.zeros(1))


def test_nan_weights_are_refused_by_the_modules_name(tmp_path):
    folder = write_model(tmp_path)
    checkpoint = Checkpoint.open(folder)

    def read(name):
        tensor = checkpoint.tensor(name).float()
        if name == "model.layers.1.mlp.up_proj.weight":
            tensor[3, 4] = float("nan")
        return tensor

    stream, statistics = BlockStream(AutoConfig.from_pretrained(folder), read), Statistics()
    stream.start(samples(1))
    stream.advance(stream.load(0))
    with pytest.raises(RecipeError, match=r"model\.layers\.1\.mlp\.down_proj.*NaN"):
        stream.load(1).run(0, on_input=lambda name, x: statistics.observe(name, "input", x))
