"""The stream runs the model that transformers runs, one block at a time."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoConfig, AutoModelForCausalLM

from calibrate.attention import causal_attention
from calibrate.data import TokenSet
from calibrate.observers import choose_absmax
from calibrate.spec import ObserverSpec
from calibrate.statistics import Statistics
from calibrate.stream import BlockStream
from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError, RecipeError
from tests.conftest import write_model
from tests.refusals import refused_checkpoint, refused_recipe

FAMILIES = ["llama", "qwen2", "qwen3", "mistral"]
WINDOWED = {  # the second block of two, where layers may differ
    "qwen2": {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    "qwen3": {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    "mistral": {"sliding_window": 16},
}


def samples(count=6, seed=0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, 384, (n,), generator=generator) for n in range(20, 20 + 7 * count, 7)]


def open_stream(folder, sequences=(), read=None, **options) -> BlockStream:
    """A model's stream, started where it is given samples; `read` stands for its checkpoint."""
    read = read or Checkpoint.open(folder).tensor
    stream = BlockStream(AutoConfig.from_pretrained(folder), read, **options)
    if sequences:
        stream.start(sequences)
    return stream


def changed_stream(folder, name: str, change, sequences=()) -> BlockStream:
    """The stream of a model of which one tensor is another."""
    tensor = Checkpoint.open(folder).tensor

    def read(wanted):
        return change(tensor(wanted)) if wanted == name else tensor(wanted)

    return open_stream(folder, sequences, read)


def collect(folder, sequences) -> Statistics:
    stream, statistics = open_stream(folder, sequences), Statistics()
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_block_gives_what_the_whole_model_gives(make_model, family, dtype):
    folder = make_model(family)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
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
    stream = open_stream(folder, sequences, dtype=dtype)
    for index in range(2):
        block = stream.load(index)
        for number in range(len(sequences)):
            seen = []
            out = block.run(number, on_kv=lambda k, v, seen=seen: seen.extend((k, v)))
            assert torch.equal(out, outputs[index, number].view_as(out))
            layer = caches[number].layers[index]
            assert torch.equal(seen[0], layer.keys[0].transpose(0, 1))
            assert torch.equal(seen[1], layer.values[0].transpose(0, 1))
        stream.advance(block)


@pytest.mark.parametrize("family", WINDOWED)
def test_windows_are_those_of_the_whole_model(make_model, family):
    folder, ids = make_model(family, **WINDOWED[family]), samples()[-1]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).model
    whole = [None, None]
    for i, layer in enumerate(model.layers):
        layer.register_forward_hook(lambda _, __, out, i=i: whole.__setitem__(i, out[0]))
    with torch.no_grad():
        model(ids[None])
    full, stream = open_stream(make_model(family), [ids]), open_stream(folder, [ids])
    for index in range(2):
        block, unlimited = stream.load(index), full.load(index)
        out = block.run(0)
        assert torch.equal(out, whole[index].view_as(out))
        limited = family == "mistral" or index == 1
        assert torch.allclose(out, unlimited.run(0), atol=1e-5) != limited
        stream.advance(block)
        full.advance(unlimited)


@pytest.mark.parametrize("family", FAMILIES)
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


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_changes_nothing(make_model, family):
    """Samples of unequal length: alone, padded to the longest, and padded further."""
    folder, sequences = make_model(family), samples(4)
    alone = collect(folder, sequences)
    for extra, filler in ((0, 0), (9, 7), (50, 383)):
        width = max(map(len, sequences)) + extra
        ids = torch.full((len(sequences), width), filler)
        mask = torch.zeros(ids.shape, dtype=torch.bool)
        for row, sequence in enumerate(sequences):
            ids[row, : len(sequence)] = sequence
            mask[row, : len(sequence)] = True
        padded = TokenSet(ids, mask, "random", "calibration")
        assert collect(folder, padded.sequences()) == alone
    for method in ("absmax", "percentile", "mse"):
        scales = scales_of_a_padded_batch(folder, sequences, ObserverSpec(method=method))
        for name, absmax in scales.items():
            chosen = choose_absmax(alone[name, "input"], ObserverSpec(method=method))
            assert chosen == pytest.approx(absmax, rel=0.01)


def scales_of_a_padded_batch(folder, sequences, spec: ObserverSpec) -> dict[str, float]:
    """Ranges from transformers' own forward of one padded batch, its padding cut away after."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(s) for s in sequences], True)
    statistics = Statistics()
    for name, module in model.model.named_modules(prefix="model"):
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(
                lambda _, x, name=name: statistics.observe(name, "input", x[0][mask.bool()])
            )
    with torch.no_grad():
        model(torch.nn.utils.rnn.pad_sequence(sequences, True), attention_mask=mask)
    return {name: choose_absmax(stats, spec) for (name, _), stats in statistics.items()}


def test_one_block_is_in_memory_at_a_time(make_model):
    folder = make_model("llama", layers=5)
    checkpoint = Checkpoint.open(folder)
    alive: list[tuple[str, weakref.ref]] = []  # of the memory: a tensor may be wrapped anew

    def read(name):
        memory = checkpoint.tensor(name).float().numpy().copy()
        alive.append((name, weakref.ref(memory)))
        return torch.from_numpy(memory)

    stream = open_stream(folder, read=read)
    assert not alive  # nothing is read before it is needed
    stream.start(samples(2))
    assert [name for name, _ in alive] == ["model.embed_tokens.weight"]
    blocks = []
    for index in range(5):
        blocks.append(stream.load(index))
        gc.collect()
        held = {name.split(".")[2] for name, ref in alive if ref() is not None}
        assert held == {str(index)}, held
        stream.advance(blocks[-1])
    gc.collect()
    assert not [name for name, ref in alive if ref() is not None]  # though the blocks are held
    assert len(alive) == len({name for name, _ in alive}) == 1 + 5 * 9  # each is read once


@pytest.mark.parametrize("tokens", [1, 100, 128, 300])
def test_attention_by_pieces_is_attention(tokens):
    generator = torch.Generator().manual_seed(tokens)
    q, k, v = (torch.randn(1, heads, tokens, 16, generator=generator) for heads in (4, 2, 2))
    want = scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True)
    assert torch.allclose(causal_attention(q, k, v, 0.3), want, atol=1e-5)


def test_hooks_leave_nothing_behind(make_model):
    stream = open_stream(make_model("llama"), samples(1))
    block = stream.load(0)
    seen = []
    block.run(0, on_input=lambda name, x: seen.append((name, x.shape)), on_kv=lambda k, v: None)
    assert {name for name, _ in seen} == set(block.linears) == set(stream.linears("model.layers.0"))
    count = len(seen)
    block.run(0)
    assert len(seen) == count


def test_an_unknown_family_is_refused():
    config = AutoConfig.for_model("bert")
    with pytest.raises(CheckpointError, match="'bert' is not supported.*an encoder"):
        BlockStream(config, lambda name: torch.zeros(1))


def overflowing(folder, leaf: str) -> BlockStream:
    """A stream before its block 1, of which a layer's products are too large."""

    def change(tensor):  # finite, and its products are not
        return tensor.float().index_fill(0, torch.tensor([3]), 3e38)

    stream = changed_stream(folder, f"model.layers.1.mlp.{leaf}.weight", change, samples(1))
    stream.advance(stream.load(0))
    return stream


def test_nan_weights_are_refused_by_the_modules_name(tmp_path):
    stream, statistics = overflowing(write_model(tmp_path), "up_proj"), Statistics()
    with pytest.raises(RecipeError, match=r"model\.layers\.1\.mlp\.down_proj.*NaN"):
        stream.load(1).run(0, on_input=lambda name, x: statistics.observe(name, "input", x))


def test_nan_that_no_linear_layer_sees_is_refused_by_the_blocks_name(make_model):
    stream = overflowing(make_model("llama"), "down_proj")
    refused_recipe(r"model\.layers\.1: .*NaN", stream.advance, stream.load(1))


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.layers.0.post_attention_layernorm.weight",
        "model.layers.1.mlp.up_proj.weight",
        "model.layers.1.mlp.down_proj.weight",
    ],
)
def test_a_weight_that_is_not_finite_is_named(name, value, make_model):
    """And not the layer that reads what it makes."""

    def change(tensor):
        changed = tensor.clone()
        changed.view(-1)[5] = float(value)
        return changed

    def run():
        stream = changed_stream(make_model("llama"), name, change, samples(1))
        for index in range(2):
            stream.advance(stream.load(index))

    refused_checkpoint(f"^{name} holds NaN or infinity, in 1 of", run)


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight"])
def test_weights_of_another_shape_are_refused_by_name(make_model, name):
    stream = changed_stream(make_model("llama"), name, lambda tensor: tensor[:-1])
    step = stream.load if "layers" in name else lambda _: stream.start(samples(1))
    refused_checkpoint(name.replace(".", r"\.") + ".*config", step, 0)
