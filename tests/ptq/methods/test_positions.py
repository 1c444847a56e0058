"""Means of keys, and moments of queries, over a context, from windows that begin at 0."""

import importlib
import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from formats.families.registry import find_family
from formats.families.sizes import turning_pairs
from inference.config import EngineConfig
from inference.engine import Engine
from ptq.api import quantize
from ptq.methods.common.positions import NEAR, OFFSETS, Positions
from tests.ptq.quantizing import edit_model
from tests.tiny_families import TINY


@pytest.mark.parametrize(
    ("family", "layer"), [("llama", 0), ("glm", 0), ("phi3", 1), ("gemma3_text", 0), ("smollm3", 0)]
)
def test_they_are_those_of_windows_that_begin_later(make_model, family, layer):
    """By transformers' own code at every offset: halves, pairs, a part of a head, two kinds."""
    own = {"max_position_embeddings": 3000}
    config = AutoConfig.from_pretrained(make_model(family, **TINY.get(family, {}) | own))
    model = AutoModelForCausalLM.from_config(config)
    values, declared = config.to_dict(), find_family(config.to_dict())
    assert declared is not None
    pairs = turning_pairs(declared, values, layer)
    found = Positions.of_layer(declared, config, layer, pairs)
    assert found is not None
    share = (torch.arange(OFFSETS, dtype=torch.float64) + 0.5) / OFFSETS
    offsets = (NEAR * ((3000 / NEAR) ** share - 1)).round().long()
    kinds = getattr(config, "layer_types", None)
    kind = {"layer_type": kinds[layer]} if family == "gemma3_text" else {}
    k = torch.randn(1, 2, 1, len(pairs))
    cos, sin = model.model.rotary_emb(k, offsets[None], **kind)
    code = importlib.import_module(type(model).__module__)
    every = k.expand(1, 2, OFFSETS, -1)
    turned = code.apply_rotary_pos_emb(every, every, cos, sin)[1][0].double()
    at_zero = k[0, :, 0].double()
    torch.testing.assert_close(found.mean(at_zero), turned.mean(1), atol=1e-4, rtol=1e-4)
    moments = turned.mT @ turned / OFFSETS
    given = at_zero[:, :, None] * at_zero[:, None]
    torch.testing.assert_close(found.moments(given), moments, atol=1e-3, rtol=1e-3)
    assert (found.reach(at_zero.abs())[:, None] > turned.abs() - 1e-4).all()


def biased(tensors: dict[str, torch.Tensor]) -> None:
    """Keys of one large mean before they turn, as those of Qwen2."""
    for name, x in tensors.items():
        if name.endswith(("k_proj.bias", "q_proj.weight")):
            x.mul_(0 if x.dim() == 1 else 8)
        if name.endswith("k_proj.bias"):
            x.add_(20 * torch.randn(x.shape, generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize("scheme", ["c4", "c8_fp8"])
def test_keys_hold_far_beyond_the_windows_that_were_seen(make_model, tmp_path, scheme):
    """Where the mean over the windows is taken away, twice as much is lost at 3,000 and more."""
    sizes = {"max_position_embeddings": 4096, "rope_theta": 1e6, "num_hidden_layers": 1}
    base = edit_model(make_model("qwen2", **sizes), tmp_path / "model", biased)
    rows = (" ".join(str(i * j % 97) for i in range(300)) for j in range(1, 17))
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"text": row}) for row in rows))
    given = {"data": tmp_path / "rows.jsonl", "output": tmp_path / "out", "progress": False}
    overrides = [f"scheme={scheme}", "dataset.fewer=true"]
    run = quantize("c8", model=base, overrides=overrides, **given)
    config = EngineConfig(max_model_len=3100, max_batch_size=1)
    tokens = torch.randint(5, 250, (3001,), generator=torch.Generator().manual_seed(0)).tolist()
    float_logs, logs = (
        Engine.from_pretrained(path, config=config).score(tokens).log_softmax(1)
        for path in (base, run.checkpoint)
    )
    kl = (float_logs.exp() * (float_logs - logs)).sum(1)
    assert kl[2500:].mean() < 1.6 * kl[:200].mean()
