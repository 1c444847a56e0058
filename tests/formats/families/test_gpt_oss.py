"""gpt-oss: sinks, windows in turn, biases everywhere, bounded experts in bf16 or as published."""

import pytest
import torch

from formats.checkpoint.read import Checkpoint
from formats.errors import RecipeError
from formats.foreign.mxfp4 import SCHEME
from inference.engine import Engine
from kernels.op_inputs import Clamped
from ptq.convert.convert import convert
from ptq.methods.rotation import RotationSpec
from ptq.methods.rtn import RTNSpec
from ptq.pipeline.driver import quantize_tokens
from ptq.plan.describe import steps
from ptq.plan.preflight import header_bytes
from tests.families import (
    METHODS,
    but_one_in_ci,
    check_blocks,
    check_engine,
    distance,
    transformers_logits,
)
from tests.mixtures import check_quantized_experts, publish_mxfp4, stored
from tests.ptq.quantizing import edit_model, make_plan, random_tokens

ROPE = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
SIZES = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "intermediate_size": 128,
    "sliding_window": 16,
    "rope_parameters": ROPE,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def gpt_oss(make_model, tmp_path_factory):
    def decide(tensors: dict[str, torch.Tensor]) -> None:
        """Routers of random weights would send a token elsewhere for the smallest of errors."""
        for name in tensors:
            if ".router." in name:
                tensors[name] = tensors[name] * 3

    out = tmp_path_factory.mktemp("gpt_oss") / "m"
    return edit_model(make_model("gpt_oss", **SIZES), out, decide)


@pytest.fixture(scope="module")
def published(gpt_oss, tmp_path_factory):
    """The model in MXFP4, and the bf16 model that this stands for."""
    return publish_mxfp4(gpt_oss, tmp_path_factory.mktemp("gpt_oss"))


def test_logits_and_blocks_are_those_of_transformers(gpt_oss):
    check_blocks(gpt_oss)
    engine = check_engine(gpt_oss, random_tokens(1, 60).ids[0].clamp(min=1))
    assert engine.model.config.windows == (16, None)
    assert engine.model.layers[0].feed_forward.activation == Clamped(1.702, 7.0)


@pytest.mark.parametrize("preset", but_one_in_ci("w4"))
def test_a_quantized_checkpoint_is_near_the_float_model(gpt_oss, tmp_path, preset):
    found = check_quantized_experts(gpt_oss, tmp_path, preset)
    assert "model.layers.1.mlp.experts.3.down_proj" in found.quantized_modules
    assert "model.layers.1.mlp.experts.3.down_proj.bias" in found


def test_a_published_folder_runs_as_it_is_stored(published):
    folder, exact = published
    ids = random_tokens(1, 60).ids[0].clamp(min=1)
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.scheme.of_layers == SCHEME
    assert len(checkpoint.quantized_modules) == 2 * 4 * 3
    assert checkpoint.weight_shape("model.layers.0.mlp.experts.2.up_proj") == (128, 128)
    engine = check_engine(exact, ids)
    ours = Engine.from_pretrained(folder).score(ids.tolist())
    assert distance(ours, engine.score(ids.tolist())) < 1e-4
    assert distance(ours, transformers_logits(exact, ids)) < 1e-4


@pytest.mark.parametrize("preset", but_one_in_ci("c8", [*METHODS, "c8"]))
def test_quantizing_a_published_folder_keeps_its_experts_bit_for_bit(published, tmp_path, preset):
    folder, exact = published
    methods = METHODS[preset][0] if preset in METHODS else ()
    plan = make_plan(folder, tmp_path / "run", preset, methods=methods)
    actions = {module.name.rpartition(".layers.0.")[2]: module.action for module in plan.modules}
    assert actions["mlp.experts.0.up_proj"] == "stored"
    assert actions["mlp.router"] == "float"
    router = next(module for module in plan.modules if module.name.endswith("mlp.router"))
    assert len(list(steps(plan, router))) == 1, "nothing is folded into what is kept"
    result = quantize_tokens(plan, random_tokens(), progress=False)
    found, wanted = stored(result.checkpoint), stored(folder)
    experts = {name for name in wanted if ".experts." in name}
    assert experts == {name for name in found if ".experts." in name}
    assert all(torch.equal(found[name], wanted[name]) for name in experts)
    size = sum(tensor.nbytes for tensor in found.values())
    names = [module.name for module in plan.modules]  # headers are counted as if apart
    most = header_bytes(
        [f"{name}.{leaf}" for name in names for leaf in ("weight", "scale", "bias")]
    )
    assert size < plan.prediction.checkpoint_bytes <= 1.01 * size + most
    checkpoint = Checkpoint.open(result.checkpoint, verify=True)
    assert checkpoint.scheme_of("model.layers.0.mlp.experts.0.up_proj") == SCHEME
    ids = random_tokens().sequences()[1]
    engine = Engine.from_pretrained(checkpoint.path, quantized_kv=False)
    bound = METHODS[preset][1] if preset in METHODS else 1e-4
    assert distance(engine.score(ids.tolist()), transformers_logits(exact, ids)) < bound


def test_experts_that_are_kept_do_not_turn(published, tmp_path):
    with pytest.raises(RecipeError, match=r"kept as it is stored.*Set residual: false"):
        make_plan(published[0], tmp_path, "w4", methods=(RotationSpec(), RTNSpec()))


def test_floats_of_a_published_folder_are_what_it_stands_for(published, tmp_path):
    folder, exact = published
    convert(folder, tmp_path / "float", "float")
    found, wanted = stored(tmp_path / "float"), stored(exact)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
