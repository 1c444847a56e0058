"""Through the real libraries, where they are installed: their files in, ours to them."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from formats.checkpoint.read import Checkpoint
from ptq.convert.convert import convert
from tests.ptq.convert.conftest import ALL_SCHEMES

MODEL = Path(__file__).resolve().parents[3] / "recipes" / "tiny-python"
IDS = torch.arange(40)[None] % 384


def load(folder: Path, dtype: torch.dtype = torch.float32, **options) -> nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options)


def require_same_function(found: nn.Module, wanted: nn.Module, most: float) -> None:
    with torch.no_grad():
        a, b = found(IDS).logits.float(), wanted(IDS).logits.float()
    assert (a - b).norm() / b.norm() < most


def float_weights(folder: Path, out: Path, dtype: str) -> dict[str, Tensor]:
    convert(folder, out, "float", dtype=dtype)
    checkpoint = Checkpoint.open(out)
    return {n: checkpoint.tensor(n) for n in checkpoint.names() if n.endswith("_proj.weight")}


@pytest.mark.parametrize("name", [*ALL_SCHEMES, "w4c8", "c8"])
def test_compressed_tensors_runs_what_we_wrote(name, quantized, tmp_path):
    pytest.importorskip("compressed_tensors")
    from transformers import CompressedTensorsConfig

    source = quantized(name)
    # Versions from 0.18 refuse packed zero points but for this, which rounds to the scales' type.
    asymmetric = "asym" in name
    options = {"quantization_config": CompressedTensorsConfig(dequantize=True)}
    theirs = load(source, **(options if asymmetric else {}))
    dtype = "bfloat16" if asymmetric else "float32"
    convert(source, tmp_path / "float", "float", dtype=dtype)
    require_same_function(theirs, load(tmp_path / "float"), 1e-5)


@pytest.mark.parametrize(("preset", "most"), [(None, 1e-3), ("a8w8_dynamic", 0.3)])
def test_vllm_gives_the_same_probabilities(preset, most, make_quantized, monkeypatch):
    """Of the tokens of a text; int8 products of processors without VNNI may saturate there."""
    vllm = pytest.importorskip("vllm")
    from inference.engine import Engine

    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    folder = make_quantized(MODEL, preset) if preset else MODEL
    engine = Engine.from_pretrained(folder)
    ids = engine.tokenizer((MODEL / "README.md").read_text(), verbose=False)["input_ids"][:300]
    ours = torch.log_softmax(engine.score(ids), dim=1)[range(len(ids) - 1), ids[1:]]
    theirs = vllm.LLM(str(folder), enforce_eager=True, max_model_len=512, dtype="float32")
    once = vllm.SamplingParams(max_tokens=1, prompt_logprobs=0)
    (output,) = theirs.generate([{"prompt_token_ids": ids}], once)
    given = [
        row[token].logprob for row, token in zip(output.prompt_logprobs, ids, strict=True) if row
    ]
    assert (ours - torch.tensor(given)).square().mean().sqrt() < most


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize(
    ("quant_type", "nested"), [("nf4", False), ("nf4", True), ("fp4", False), ("fp4", True)]
)
def test_bitsandbytes_four_bits_come_in_bit_for_bit(
    family, quant_type, nested, make_model, tmp_path
):
    functional = pytest.importorskip("bitsandbytes.functional")
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=quant_type, bnb_4bit_use_double_quant=nested
    )
    options = {"quantization_config": config, "device_map": "cpu"}
    model = load(make_model(family), torch.bfloat16, **options)
    model.save_pretrained(tmp_path / "bnb")
    found = float_weights(tmp_path / "bnb", tmp_path / "float", "bfloat16")
    assert len(found) == 14
    for name, weight in found.items():
        theirs = model.get_parameter(name)
        assert torch.equal(weight, functional.dequantize_4bit(theirs.data, theirs.quant_state))
    tensors = Checkpoint.open(tmp_path / "float")
    original = Checkpoint.open(make_model(family))
    assert set(tensors.names()) == set(original.names())
    require_same_function(model, load(tmp_path / "float", torch.bfloat16), 0.02)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_bitsandbytes_int8_comes_in_bit_for_bit(family, make_model, tmp_path):
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    options = {"quantization_config": BitsAndBytesConfig(load_in_8bit=True), "device_map": "cpu"}
    model = load(make_model(family), torch.bfloat16, **options)
    model.save_pretrained(tmp_path / "bnb")
    convert(tmp_path / "bnb", tmp_path / "out", "compressed_tensors")
    found = Checkpoint.open(tmp_path / "out", verify=True)
    assert len(found.quantized_modules) == 14
    for module in found.quantized_modules:
        theirs = model.get_submodule(module).weight
        assert torch.equal(found.weight(module).q, theirs.data)
        assert torch.equal(found.weight(module).scale, theirs.SCB[:, None] / 127)


def neural_compressor_config(torch_api, name: str):
    if name.startswith("gptq"):
        return torch_api.GPTQConfig(
            bits=4, group_size=32, use_sym=False, act_order=name == "gptq_act_order"
        )
    return torch_api.RTNConfig(
        bits=8 if name == "rtn_int8" else 4,
        group_size=-1 if name == "rtn_int8" else 32,
        use_sym=name != "rtn_asym",
        dtype="int",
    )


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("name", ["rtn", "rtn_asym", "rtn_int8", "gptq", "gptq_act_order"])
def test_neural_compressor_comes_in_bit_for_bit(family, name, make_model, tmp_path):
    torch_api = pytest.importorskip("neural_compressor.torch.quantization")
    model = torch_api.prepare(load(make_model(family)), neural_compressor_config(torch_api, name))
    model(IDS)
    model = torch_api.convert(model)
    theirs = {n: m.recover() for n, m in model.named_modules() if hasattr(m, "recover")}
    torch_api.save(model, tmp_path / "inc", format="huggingface")
    found = float_weights(tmp_path / "inc", tmp_path / "float", "float32")
    assert {f"{module}.weight" for module in theirs} == found.keys()
    for module, weight in theirs.items():
        torch.testing.assert_close(found[f"{module}.weight"], weight.float(), rtol=2**-10, atol=0)
    assert set(Checkpoint.open(tmp_path / "float").names()) == set(
        Checkpoint.open(make_model(family)).names()
    )
    if name != "gptq_act_order":
        convert(tmp_path / "inc", tmp_path / "out", "compressed_tensors")
        assert len(Checkpoint.open(tmp_path / "out", verify=True).quantized_modules) == 14


@pytest.mark.parametrize(
    ("name", "target"),
    [("w4", "gptq"), ("w4", "gptq_v2"), ("w4_asym", "gptq_v2"), ("w8_g64", "gptq"), ("w4", "awq")],
)
def test_gptqmodel_runs_what_we_wrote(name, target, quantized, tmp_path):
    pytest.importorskip("gptqmodel")
    convert(quantized(name), tmp_path / "out", target)
    convert(tmp_path / "out", tmp_path / "float", "float", dtype="float32")
    theirs = load(tmp_path / "out", torch.bfloat16)
    assert not [
        n for n, m in theirs.named_modules() if n.endswith("_proj") and type(m) is nn.Linear
    ]
    require_same_function(theirs, load(tmp_path / "float", torch.bfloat16), 0.03)
