"""Models with a state and a layer for further tokens: what quantizing makes of it."""

import json

import pytest
import torch
from safetensors.torch import load_file

from formats.checkpoint.read import Checkpoint
from ptq.methods.rtn import RTNSpec
from ptq.pipeline.driver import quantize_tokens
from ptq.report.generated import measure_drafts
from tests.inference.speculate.predicting import STATEFUL, engine, write_knowing
from tests.inference.speculate.requests import accepted
from tests.inference.transformers_code.test_states import write_small
from tests.ptq.quantizing import make_plan, random_tokens


@pytest.mark.parametrize("kind", STATEFUL)
def test_a_quantized_model_has_the_layer_rounded_and_drafts_as_well(kind, tmp_path):
    model = write_knowing(write_small(kind, tmp_path), tmp_path / "model")
    wanted = {n: t for n, t in load_file(model / "model.safetensors").items() if "mtp." in n}
    before = accepted(engine, model)
    assert before > 3.3  # of 4
    for preset in ("w4", "a8w8c8"):
        ignore = ("lm_head", "re:.*out_proj")  # of 64 inputs here, and groups have 128
        plan = make_plan(model, tmp_path / preset, preset, methods=(RTNSpec(),), ignore=ignore)
        path = quantize_tokens(plan, random_tokens(), progress=False).checkpoint
        written = {n: t for f in path.glob("*.safetensors") for n, t in load_file(f).items()}
        checkpoint = Checkpoint.open(path)
        rounded = {n for n in checkpoint.quantized_modules if n.startswith("mtp.")}
        assert "mtp.layers.0.self_attn.q_proj" in rounded
        assert not any(checkpoint.scheme_of(name).static_input for name in rounded)
        left = [name for name in wanted if name.removesuffix(".weight") not in rounded]
        left = [name for name in left if ".experts." not in name]
        assert {"mtp.fc.weight", "mtp.norm.weight"} <= {*left}
        assert all(torch.equal(written[name], wanted[name]) for name in left)
        config = json.loads((path / "config.json").read_text())
        assert "mtp.fc" in config["quantization_config"]["ignore"]
        assert checkpoint.predicting_layers == ("mtp",)
        assert accepted(engine, path) >= 0.98 * before
    engines = (engine(folder, None) for folder in (model, path))
    told = measure_drafts(*engines, random_tokens().sequences()[:2])
    assert told.quantized >= 0.98 * told.original > 3
