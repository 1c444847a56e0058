"""Whether a config.json with code beside it is read without that code."""

from __future__ import annotations

import pytest

from formats.published.known import needs_code


def asking(kind, name):
    return {"model_type": kind, "auto_map": {"AutoModelForCausalLM": name}}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("falcon", "modeling_falcon.FalconForCausalLM"),
        ("mpt", "modeling_mpt.MPTForCausalLM"),
        ("phi3", "microsoft/Phi-3-mini--modeling_phi3.Phi3ForCausalLM"),
        ("deepseek_v3", "modeling_deepseek.DeepseekV3ForCausalLM"),
        ("chatglm", "modeling_chatglm.ChatGLMForConditionalGeneration"),
        ("baichuan", "modeling_baichuan.BaichuanForCausalLM"),
    ],
)
def test_code_of_a_class_that_transformers_or_we_have_is_not_needed(kind, name):
    assert not needs_code(asking(kind, name))


@pytest.mark.parametrize(
    ("kind", "name"),
    [("llama", "modeling.MyLlamaForCausalLM"), ("qwen", "modeling_qwen.QWenLMHeadModel")],
)
def test_other_code_is_needed_and_never_run(kind, name):
    assert needs_code(asking(kind, name))
    assert needs_code({"model_type": kind, "auto_map": {"AutoModel": "modeling.Model"}})
    assert needs_code({"model_type": kind, "auto_map": ["modeling.Model"]})
