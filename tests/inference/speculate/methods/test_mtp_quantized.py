"""Layers for further tokens after quantizing: rounded or kept, and drafts as good as before."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError, EngineError
from inference.requests.request import SamplingParams
from ptq.convert.convert import convert
from ptq.methods.rotation import RotationSpec
from ptq.methods.rtn import RTNSpec
from ptq.pipeline.driver import quantize_tokens
from ptq.plan.describe import describe_plan
from ptq.report.generated import DraftPair, measure_drafts
from ptq.report.inspection import describe, inspect
from tests.adapters import write_adapter
from tests.fake_quantized import dequantized
from tests.families import distance, transformers_logits
from tests.formats.checkpoint.test_served_cache import served
from tests.inference.speculate.predicting import (
    KINDS,
    engine,
    names_of,
    second_layer,
    write_predicting,
)
from tests.inference.speculate.requests import accepted
from tests.ptq.quantizing import SMOOTH, edit_model, make_plan, random_tokens

LONG = SamplingParams(max_tokens=40, ignore_eos=True)
PROMPTS = [[5 + i] * 15 + [9 + 3 * i] * i + [40 + i] for i in range(4)]
TWO = pytest.mark.parametrize("kind", ["deepseek_v3", "mimo"], indirect=True)
DENSE = pytest.mark.parametrize("kind", ["mimo"], indirect=True)


@pytest.fixture(scope="module", params=KINDS)
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def original(make_model, tmp_path_factory, kind) -> Path:
    own = {"num_nextn_predict_layers": 2, "tie_word_embeddings": False}
    plain = make_model(kind, **KINDS[kind] | own)
    out = tmp_path_factory.mktemp("original") / "model"
    return edit_model(plain, out, lambda tensors: write_predicting(tensors, kind))


def layer_tensors(folder: Path, kind: str) -> dict[str, Tensor]:
    """Those of both layers, by their names in the file."""
    names = names_of(kind)
    both = (f"{names.layer(2)}.", f"{second_layer(kind)}.")
    files = folder.glob("*.safetensors")
    tensors = {name: t for file in files for name, t in load_file(file).items()}
    return {name: t for name, t in tensors.items() if name.startswith(both)}


def quantized(
    model: Path, out: Path, preset: str, methods: tuple = (RTNSpec(),), ignore: tuple = ()
) -> Path:
    plan = make_plan(model, out, preset, methods=methods, ignore=("lm_head", *ignore))
    return quantize_tokens(plan, random_tokens(), progress=False).checkpoint


def everything_in(kind: str) -> str:
    """A pattern for both layers."""
    return r"re:model\.mtp_layers\." if kind == "mimo" else r"re:model\.layers\.[23]\."


def test_the_layer_is_kept_where_it_is_ignored(kept, original, kind):
    wanted, found = layer_tensors(original, kind), layer_tensors(kept, kind)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    config, written = (json.loads((f / "config.json").read_text()) for f in (original, kept))
    assert {key: written[key] for key in config} == config
    said = written["quantization_config"]["ignore"]
    assert any(re.match(entry[3:], "model.layers.2.x") for entry in said if entry[:3] == "re:")
    assert accepted(engine, kept) >= 0.98 * accepted(engine, original)


def test_the_layer_is_rounded_and_drafts_as_well(original, kind, tmp_path):
    """What is around its block stays."""
    wanted, before = layer_tensors(original, kind), accepted(engine, original)
    assert before > 3.3  # of 4
    smooth = SMOOTH if kind == "mimo" else (RTNSpec(),)  # a search over experts takes long
    for preset, methods in (("w4", (RTNSpec(),)), ("a8w8c8", smooth)):
        path = quantized(original, tmp_path / preset, preset, methods)
        checkpoint = Checkpoint.open(path)
        rounded = [n for n in checkpoint.quantized_modules if f"{n}.weight" in wanted]
        leaves = {name.rpartition(".")[2] for name in rounded}
        assert {"o_proj", "gate_proj", "up_proj", "down_proj"} <= leaves
        assert not leaves & {"gate", "eh_proj", "input_proj", "enorm"}
        for name in rounded:
            weight = wanted[f"{name}.weight"].float()
            scheme = checkpoint.scheme_of(name)
            assert scheme.weights is not None
            assert not scheme.static_input  # no sample runs through it
            found = dequantized(checkpoint, name)
            assert distance(found, weight) <= distance(nearest(weight, preset), weight) + 1e-6
        kept = wanted.keys() - {f"{name}.weight" for name in rounded}
        assert all(torch.equal(checkpoint.tensor(name), wanted[name]) for name in kept)
        assert accepted(engine, path) >= 0.98 * before


def nearest(weight: Tensor, preset: str) -> Tensor:
    """A weight rounded by the largest magnitude of a channel (int8), or of 128 inputs (int4)."""
    size, most = (128, 7.5) if preset == "w4" else (weight.shape[1], 127)
    groups = weight.double().unflatten(1, (-1, size)).numpy()
    scale = np.abs(groups).max(axis=-1, keepdims=True) / most
    rounded = np.clip(np.rint(groups / scale), -np.ceil(most), np.floor(most)) * scale
    return torch.from_numpy(rounded).flatten(1).float()


@pytest.fixture(scope="module")
def w4(original, tmp_path_factory) -> Path:
    return quantized(original, tmp_path_factory.mktemp("w4"), "w4")


@pytest.fixture(scope="module")
def kept(original, tmp_path_factory, kind) -> Path:
    """With the layers as they were."""
    return quantized(original, tmp_path_factory.mktemp("kept"), "w4", ignore=(everything_in(kind),))


@TWO
def test_others_read_what_is_written(w4):
    """transformers, which has no place for the layer, reads the rest."""
    ids = random_tokens().sequences()[1]
    ours = engine(w4, None).score(ids.tolist())
    assert distance(transformers_logits(w4, ids), ours) < 0.05


@TWO
def test_other_software_may_say_nothing_of_the_layer_or_have_dropped_it(kept, kind, tmp_path):
    shutil.copytree(kept, tmp_path / "silent")
    config = json.loads((kept / "config.json").read_text())
    own = config["quantization_config"]
    own["ignore"] = [entry for entry in own["ignore"] if not entry.startswith("re:")]
    del config["ptq"]
    (tmp_path / "silent" / "config.json").write_text(json.dumps(config))
    shutil.rmtree(tmp_path / "silent" / "quant")
    assert engine(tmp_path / "silent").generate(PROMPTS[:1], LONG)
    layer = layer_tensors(kept, kind)

    def drop(tensors: dict[str, Tensor]) -> None:
        for name in layer:
            del tensors[name]

    dropped = edit_model(tmp_path / "silent", tmp_path / "dropped", drop)
    assert engine(dropped, None).generate(PROMPTS[:1], LONG)
    with pytest.raises(EngineError, match=r"no layer that predicts further tokens.*mtp=PATH"):
        engine(dropped)


@TWO
def test_a_layer_that_other_software_quantized_drafts(original, make_quantized):
    folder = make_quantized(original, "w4")
    assert any("q_b_proj" in n or "q_proj" in n for n in Checkpoint.open(folder).quantized_modules)
    assert accepted(engine, folder) > 1.5


@TWO
def test_conversions_carry_it(w4, kept, kind, tmp_path):
    before = accepted(engine, w4)
    for target in ("float", "gptq"):
        convert(w4, tmp_path / "rounded" / target, target)
        assert accepted(engine, tmp_path / "rounded" / target) >= 0.98 * before
    wanted = layer_tensors(kept, kind)
    convert(kept, tmp_path / "float", "float", dtype="bfloat16")
    convert(kept, tmp_path / "gptq", "gptq")
    for target in ("float", "gptq"):
        found = layer_tensors(tmp_path / target, kind)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        assert engine(tmp_path / target).generate(PROMPTS[:1], LONG)
    convert(tmp_path / "gptq", tmp_path / "back", "compressed_tensors")
    back = layer_tensors(tmp_path / "back", kind)
    assert all(torch.equal(back[name], wanted[name]) for name in wanted)
    with pytest.raises(CheckpointError, match=f"{kind}.*is not written as GGUF"):
        convert(w4, tmp_path / "model.gguf", "gguf")


@DENSE
def test_adapters_are_of_the_blocks_alone(original, w4, kind, tmp_path):
    """Their software has no such layer: all of a kind's layers are those of the blocks."""
    adapter = write_adapter(tmp_path / "adapter", original)
    for model in (original, w4):
        runner = engine(model)
        runner.load_adapter("own", adapter)
        assert runner.generate(PROMPTS[:1], SamplingParams(max_tokens=4, adapter="own"))


@DENSE
def test_scales_of_its_cache_are_left_out(original, kind, tmp_path):
    """Other software may have them; what drafts has a cache of floats."""
    path = quantized(original, tmp_path / "a8w8c8", "a8w8c8")
    folder = served(path, tmp_path / "served", {"type": "int", "strategy": "attn_head"}, (2, 1, 1))
    file = folder / "model.safetensors"
    names = (f"model.mtp_layers.0.self_attn.{leaf}" for leaf in ("k_scale", "v_scale"))
    own = {name: torch.ones(2, 1, 1).bfloat16() for name in names}
    save_file(load_file(file) | own, file, {"format": "pt"})
    found = Checkpoint.open(folder)
    assert found.caches.kv_cache is not None
    assert not own.keys() & {*found.names()}


def test_inspect_and_the_report_tell_of_it(original, w4, kind, caplog):
    names = names_of(kind)
    lines, both = describe(inspect(Checkpoint.open(w4)), 3), (names.layer(2), second_layer(kind))
    assert f"  layers that predict further tokens: {', '.join(both)}" in lines
    engine(w4)
    assert f"{both[0]} drafts every token; {both[1]}" in caplog.text
    before, after = (engine(folder, None) for folder in (original, w4))
    found = measure_drafts(before, after, random_tokens().sequences()[:2])
    assert min(found.original, found.quantized) > 3
    assert before.speculation is None
    assert DraftPair(**found.model_dump()) == found


def test_a_report_of_models_without_one_says_nothing(tiny_llama):
    plain = engine(tiny_llama, None)
    assert measure_drafts(plain, plain, random_tokens().sequences()[:1]) is None


@pytest.mark.parametrize("residual", [True, False])
def test_rotation_leaves_it_out_or_as_it_was(make_model, tmp_path, residual):
    """It reads the residual stream; what is in it, of the values too, is its own."""
    model = edit_model(
        make_model("mimo", num_nextn_predict_layers=1, tie_word_embeddings=False),
        tmp_path / "model",
        lambda tensors: write_predicting(tensors, "mimo"),
    )
    methods = (RotationSpec(residual=residual), RTNSpec())
    plan = make_plan(model, tmp_path / "out", "w4", methods=methods)
    line = "leaves out model.mtp_layers.0: it predicts further tokens"
    assert (line in "\n".join(describe_plan(plan, {}))) == residual
    result = quantize_tokens(plan, random_tokens(), progress=False)
    events = [event.module for event in result.events if event.kind == "left_out"]
    assert events == ["model.mtp_layers.0", "model.mtp_layers.1"] * residual
    path = result.checkpoint
    found, wanted = layer_tensors(path, "mimo"), layer_tensors(model, "mimo")
    if residual:
        assert found == {}
        assert engine(path, None).generate(PROMPTS[:1], LONG)
        with pytest.raises(EngineError, match="is rotated, and the layer.*residual: false"):
            engine(path)
        return
    rounded = {f"{name}.weight" for name in Checkpoint.open(path).quantized_modules}
    assert rounded & wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted.keys() - rounded)
    assert accepted(engine, path) > 3.5
