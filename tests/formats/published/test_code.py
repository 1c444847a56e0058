"""Code of a model or a tokenizer: where it is not needed, and where it is refused."""

import json

import pytest

from formats.errors import CheckpointError
from formats.published import needs_code
from formats.tokenizer import load_tokenizer, native_settings
from tests.conftest import write_tokenizer


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
        ("mimo", "modeling_mimo.MiMoForCausalLM"),
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


NO_PREFIX = bytes([0x1A, 2, 0x18, 0])  # normalizer_spec { add_dummy_prefix: false }
PIECE = bytes([0x0A, 9, 0x0A, 2, 0x68, 0x69, 0x15, 0, 0, 0, 0])  # a piece "hi" and its score


def a_folder(folder, kind, tokenizer, files=()):
    """A folder of a published layout with a tokenizer that asks for code."""
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    settings = {"tokenizer_class": tokenizer, "auto_map": {"AutoTokenizer": ["code.Own", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    for name, data in files:
        (folder / name).write_bytes(data)
    return folder


@pytest.mark.parametrize(("data", "prefix"), [(PIECE + NO_PREFIX, False), (PIECE, True)])
def test_a_plain_sentencepiece_model_is_read_as_llamas(tmp_path, data, prefix):
    files = [("tokenizer.model", data)]
    settings = native_settings(a_folder(tmp_path, "baichuan", "BaichuanTokenizer", files))
    assert settings["tokenizer_class"] == "LlamaTokenizer"
    assert settings["add_prefix_space"] is prefix
    assert not settings["add_bos_token"]
    assert "auto_map" not in settings


def test_a_tokenizer_json_needs_no_code(tmp_path):
    write_tokenizer(tmp_path)
    a_folder(tmp_path, "chatglm", "ChatGLM4Tokenizer")
    assert load_tokenizer(tmp_path)("def add")["input_ids"]


def test_one_that_needs_code_is_refused(tmp_path):
    folder = a_folder(tmp_path, "chatglm", "ChatGLMTokenizer", [("tokenizer.model", PIECE)])
    with pytest.raises(CheckpointError, match=r"never run\. Put a tokenizer\.json of the same"):
        load_tokenizer(folder)
