"""Gemma 4 and 3n quantized: blocks that read others' K and V, experts in 3-D parameters."""

import json
from functools import cache, partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

from calibrate.stream import BlockStream
from formats.checkpoint.read import Checkpoint
from formats.families.registry import block_names
from formats.modeling.model import meta_model
from inference.config import EngineConfig
from inference.engine import Engine
from ptq.methods.refine import RefineSpec
from ptq.methods.rtn import RTNSpec
from ptq.plan.modules import block_shapes, layer_shapes
from tests.conftest import write_random, write_tokenizer
from tests.families import check_rounding, distance, divergence, transformers_logits
from tests.gemma4 import ALL, LAYOUTS, TEXT, write_tiny
from tests.ptq.plan.test_footprint import predict
from tests.ptq.quantizing import SMOOTH, goes_on, make_plan, random_tokens
from tests.ptq.quantizing import quantized as run
from tests.tiny_models import tiny_config

METHODS = {"a8w8c8": SMOOTH, "w4": (RTNSpec(),), "w8": (RTNSpec(),), "c8": ()}
IDS = random_tokens().sequences()[1]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Folders of the tiny models, each written once."""
    return cache(lambda layout: write_tiny(tmp_path_factory.mktemp(layout) / "float", layout))


def quantized(model, out, preset, **options):
    options = {"methods": METHODS[preset]} | options
    return Checkpoint.open(run(model, out, preset, **options).checkpoint)


@pytest.mark.parametrize(
    ("layout", "preset"),
    [*((layout, "a8w8c8") for layout in ALL), ("shared", "w4"), ("experts", "w4")],
)
def test_the_engine_computes_what_the_checkpoint_says(made, tmp_path, layout, preset):
    """As transformers does with the same roundings."""
    checkpoint = quantized(made(layout), tmp_path / "out", preset)
    wanted = transformers_logits(made(layout), IDS)
    check_rounding(checkpoint, IDS, wanted, 1.0, near=0.5)


@pytest.mark.parametrize("layout", ["shared", "experts"])
def test_weights_of_eight_bits_cost_next_to_nothing(made, tmp_path, layout):
    """A token that a random router sends elsewhere after a rounding costs the most."""
    checkpoint = quantized(made(layout), tmp_path / "out", "w8")
    found = Engine.from_pretrained(checkpoint.path).score(IDS.tolist())
    assert divergence(found, transformers_logits(made(layout), IDS)) < 0.01


def test_only_layers_with_a_cache_have_scales_of_it(made, tmp_path):
    checkpoint = quantized(made("shared"), tmp_path / "out", "c8")
    assert list(checkpoint.kv_scales) == [f"model.layers.{i}.self_attn" for i in (0, 1)]
    assert [k.shape for k, _ in checkpoint.kv_scales.values()] == [(2,), (2,)]
    wanted = transformers_logits(made("shared"), IDS)
    check_rounding(checkpoint, IDS, wanted, 0.5)


@pytest.mark.parametrize("layout", ALL)
def test_what_is_kept_of_a_token_is_what_was_predicted(made, layout):
    """Several hidden states, K and V for later blocks, and an embedding of each block's own."""
    checkpoint, config = Checkpoint.open(made(layout)), AutoConfig.from_pretrained(made(layout))
    linears = dict(layer_shapes(meta_model(config), checkpoint.config))
    names = block_names(checkpoint.config)
    stream = BlockStream(config, checkpoint.tensor)
    stream.start([IDS])
    for index, shape in enumerate(block_shapes(checkpoint, config, linears, (), names, ())):
        block = stream.load(index)
        own = [part for each in block.handed.own for part in each.values()]
        assert stream.inputs[0].shape == (len(IDS), shape.row)
        assert sum(part.numel() for part in own) == len(IDS) * shape.handed
        stream.advance(block)


def test_memory_and_disk_are_predicted_of_all_that_is_kept(made, tmp_path):
    few, many = (
        predict(tmp_path, made("gemma3n"), "a8w8", samples=count, length=64) for count in (64, 512)
    )
    text = AutoConfig.from_pretrained(made("gemma3n"))
    row, handed = text.altup_num_inputs * text.hidden_size, text.hidden_size_per_layer_input
    more = 4 * 64 * (512 - 64)
    assert many.disk_bytes - few.disk_bytes >= 2 * more * row
    assert many.memory_bytes - few.memory_bytes >= more * (2 * row + handed)


def test_what_is_quantized_and_what_folds_into_what(made, tmp_path):
    plan = make_plan(made("shared"), tmp_path / "out")
    inside = "model.layers.3."
    actions = {m.name.removeprefix(inside): m.action for m in plan.modules if inside in m.name}
    assert actions == {
        "self_attn.q_proj": "quantize",
        "self_attn.o_proj": "quantize",
        "mlp.gate_proj": "quantize",
        "mlp.up_proj": "quantize",
        "mlp.down_proj": "quantize",
        "per_layer_input_gate": "float",
        "per_layer_projection": "float",
    }
    groups = [g for g in plan.smoothing if g.block == "model.layers.3"]
    short = [
        (g.source.removeprefix(inside), [c.removeprefix(inside) for c in g.consumers])
        for g in groups
    ]
    assert short == [
        ("input_layernorm", ["self_attn.q_proj"]),
        ("pre_feedforward_layernorm", ["mlp.gate_proj", "mlp.up_proj"]),
        ("mlp.up_proj", ["mlp.down_proj"]),
    ]


def test_experts_are_quantized_one_by_one_and_floats_stay_as_they_lie(made, tmp_path):
    stack = "model.layers.1.experts"
    plan = make_plan(made("experts"), tmp_path / "a")
    tied = [g for g in plan.smoothing if g.tied is not None and g.block == "model.layers.1"]
    assert [g.consumers for g in tied] == [(f"{stack}.{i}.down_proj",) for i in range(4)]
    one_by_one = quantized(made("experts"), tmp_path / "b", "w4")
    assert f"{stack}.3.down_proj" in one_by_one.quantized_modules
    stored = quantized(made("experts"), tmp_path / "c", "c8")
    names = [f"{stack}.gate_up_proj", f"{stack}.down_proj"]
    original, written = (
        load_file(next(folder.glob("*.safetensors"))) for folder in (made("experts"), stored.path)
    )
    assert all(torch.equal(original[name], written[name]) for name in names)


def test_a_run_goes_on_between_who_makes_and_who_reads(made, tmp_path):
    """With K and V of the quantized blocks, which is what later quantized blocks read."""
    methods = (RTNSpec(), RefineSpec(iterations=3, batch=2))
    whole, cut = (
        partial(run, made("shared"), tmp_path / name, "w4", methods=methods)
        for name in ("whole", "cut")
    )
    goes_on(whole(), cut, saves=2)


VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 16}
VISION |= {"num_attention_heads": 2, "num_key_value_heads": 2, "patch_size": 4}
VISION |= {"position_embedding_size": 64, "model_type": "gemma4_vision"}
AUDIO = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
AUDIO |= {"subsampling_conv_channels": (8, 4), "output_proj_dims": 32, "model_type": "gemma4_audio"}


def test_the_text_of_a_published_model_is_read_alone(tmp_path):
    """Beside what computes images and sound, and with the K and V that its class leaves out."""
    config = AutoConfig.for_model(
        "gemma4",
        text_config=TEXT | LAYOUTS["shared"] | {"model_type": "gemma4_text"},
        vision_config=VISION,
        audio_config=AUDIO,
    )
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    write_tokenizer(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.language_model.layers.3.self_attn.k_proj.weight"] = torch.randn(128, 128)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with torch.no_grad():
        wanted = model(input_ids=IDS[None]).logits[0]
    sizes = EngineConfig(max_model_len=128)
    assert distance(Engine.from_pretrained(folder, config=sizes).score(IDS.tolist()), wanted) < 1e-4
    checkpoint = quantized(folder, tmp_path / "out", "w8")
    assert checkpoint.config["architectures"] == ["Gemma4ForCausalLM"]
    found = Engine.from_pretrained(checkpoint.path, config=sizes).score(IDS.tolist())
    assert divergence(found, wanted) < 1e-3


@pytest.mark.parametrize(
    ("published", "text"), [("gemma3n", "gemma3n_text"), ("gemma4_unified", "gemma4_unified_text")]
)
def test_the_text_of_others_is_found_by_the_names_of_their_tensors(tmp_path, published, text):
    folder = write_random(tmp_path / "model", tiny_config(text))
    wanted = transformers_logits(folder, IDS)
    tensors = load_file(folder / "model.safetensors")
    renamed = {n.replace("model.", "model.language_model.", 1): x for n, x in tensors.items()}
    renamed["model.embed_audio.embedding_projection.weight"] = torch.ones(8, 8)
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    both = {"model_type": published, "text_config": config}
    (folder / "config.json").write_text(json.dumps(both))
    found = Engine.from_pretrained(folder, config=EngineConfig(max_model_len=128))
    assert distance(found.score(IDS.tolist()), wanted) < 1e-4
