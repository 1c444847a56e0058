"""Routing gives the experts and weights that transformers' routers give."""

import pytest
import torch
from transformers import DeepseekV2Config, DeepseekV3Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from inference.cpu.layers import route
from inference.models.config import Routing

SIZES = {
    "hidden_size": 16,
    "num_attention_heads": 4,
    "n_routed_experts": 12,
    "num_experts_per_tok": 4,
}
GROUPS = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
OURS = {"experts": 12, "chosen": 4, "groups": 4, "chosen_groups": 2, "factor": 2.5}


@pytest.mark.parametrize("kind", ["v2", "v3"])
def test_groups_and_corrections_are_transformers(kind):
    if kind == "v2":
        config = DeepseekV2Config(**SIZES, **GROUPS, topk_method="group_limited_greedy")
        router = DeepseekV2TopkRouter(config)
        routing = Routing(**OURS, normalized=False)
    else:
        router = DeepseekV3TopkRouter(DeepseekV3Config(**SIZES, **GROUPS))
        router.e_score_correction_bias.normal_(0.0, 0.3)
        routing = Routing(**OURS, normalized=True, scores="sigmoid", best_of_group=2)
    torch.nn.init.normal_(router.weight)
    with torch.no_grad():
        logits, wanted, chosen = router(torch.randn(20, 16))
        weights, numbers = route(logits, routing, getattr(router, "e_score_correction_bias", None))
    order = chosen.argsort(), numbers.argsort()
    assert torch.equal(chosen.gather(1, order[0]), numbers.gather(1, order[1]))
    torch.testing.assert_close(weights.gather(1, order[1]), wanted.gather(1, order[0]))
