"""GLM-4-MoE: sigmoid scores, corrections, groups, an expert of all tokens, a dense first block."""

import pytest
import torch

from formats.checkpoint.read import Checkpoint
from formats.families.block_layers import SMOOTHING_KINDS, smoothing_groups
from formats.families.registry import family_of
from inference.models.config import ModelConfig
from tests.families import but_one_in_ci, check_blocks, check_engine
from tests.mixtures import check_quantized_experts
from tests.ptq.quantizing import edit_model, random_tokens

SIZES = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 2.0,
    "use_qk_norm": True,
    "attention_bias": True,
}


@pytest.fixture(scope="module")
def glm(make_model, tmp_path_factory):
    def correct(tensors: dict[str, torch.Tensor]) -> None:
        name = "model.layers.1.mlp.gate.e_score_correction_bias"
        tensors[name] = torch.linspace(-0.4, 0.4, 8)

    out = tmp_path_factory.mktemp("glm") / "m"
    return edit_model(make_model("glm4_moe", **SIZES), out, correct)


def test_logits_and_blocks_are_those_of_transformers(glm):
    check_blocks(glm)
    engine = check_engine(glm, random_tokens(1, 60).ids[0].clamp(min=1))
    dense, mixture = engine.model.layers[0].feed_forward, engine.model.layers[1].feed_forward
    assert not hasattr(dense, "router")
    assert mixture.shared is not None
    assert mixture.shared_gate is None


def test_norms_of_q_and_k_are_there_if_the_configuration_says_so(make_model):
    plain = make_model("glm4_moe", **SIZES | {"use_qk_norm": False, "attention_bias": False})
    check_engine(plain, random_tokens(1, 40).ids[0].clamp(min=1))
    assert ModelConfig.of(Checkpoint.open(plain).config).qk_norm == "none"


@pytest.mark.parametrize("preset", but_one_in_ci("a8w8c8"))
def test_a_quantized_checkpoint_is_near_the_float_model(glm, tmp_path, preset):
    found = check_quantized_experts(glm, tmp_path, preset)
    assert "model.layers.1.mlp.shared_experts.down_proj" in found.quantized_modules
    assert "model.layers.1.mlp.gate" not in found.quantized_modules


def test_experts_the_shared_one_and_the_router_read_one_norm():
    layers = [
        f"b.mlp.{m}.{n}_proj" for m in ("experts.0", "shared_experts") for n in ("gate", "up")
    ]
    layers += ["b.mlp.experts.0.down_proj", "b.mlp.shared_experts.down_proj", "b.mlp.gate"]
    family = family_of({"model_type": "glm4_moe"})
    groups = {g.source: g for g in smoothing_groups(family, "b", layers, SMOOTHING_KINDS)}
    assert groups["b.post_attention_layernorm"].routers == ("b.mlp.gate",)
    assert len(groups["b.post_attention_layernorm"].consumers) == 4
    assert groups["b.mlp.experts.0.up_proj"].tied is not None
    assert groups["b.mlp.shared_experts.up_proj"].tied is None
