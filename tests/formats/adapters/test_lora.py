"""Reading LoRA adapters: what PEFT computes with them, and what is refused, by name."""

import json
import logging
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from formats.adapters import Lora, read_lora
from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError
from formats.hub import _download
from tests.adapters import TARGETS, write_adapter
from tests.hub import point_at, serve_hub
from tests.ptq.quantizing import edit_model
from tests.refusals import refused_checkpoint as refused

WEIGHTS = "adapter_model.safetensors"
Q0 = "base_model.model.model.layers.0.self_attn.q_proj"
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def adapter(tiny_llama, tmp_path) -> Path:
    return write_adapter(tmp_path / "adapter", tiny_llama)


@pytest.fixture(scope="module")
def base(tiny_llama) -> Checkpoint:
    return Checkpoint.open(tiny_llama)


def change(folder: Path, edit: Callable[[Tensors], Any] | None = None, **settings: Any) -> None:
    """Edit the tensors and the settings of an adapter."""
    if edit is not None:
        tensors = load_file(folder / WEIGHTS)
        edit(tensors)
        save_file(tensors, folder / WEIGHTS)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def rename(tensors: Tensors, old: str, new: str) -> None:
    for name in [name for name in tensors if old in name]:
        tensors[name.replace(old, new)] = tensors.pop(name)


def delta(lora: Lora, module: str) -> torch.Tensor:
    own = lora.modules[module]
    return own.b @ own.a


def written(folder: Path, module: str) -> torch.Tensor:
    """B A of the file."""
    a, b = (
        load_file(folder / WEIGHTS)[f"base_model.model.{module}.lora_{kind}.weight"].float()
        for kind in "AB"
    )
    return b @ a


def test_every_layer_of_the_file_is_read(adapter, base):
    lora = read_lora(adapter, base)
    assert lora.path == adapter
    assert lora.rank == 4
    assert len(lora.modules) == 2 * len(TARGETS)
    for module, own in lora.modules.items():
        assert own.a.dtype == own.b.dtype == torch.float32
        assert (len(own.b), own.a.shape[1]) == base.shape(f"{module}.weight")
        assert torch.allclose(own.b @ own.a, 2 * written(adapter, module), atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "scales"),
    [
        ({"lora_alpha": 1}, (1 / 4, 1 / 4)),
        ({"lora_alpha": 3.0, "use_rslora": True}, (3 / 2, 3 / 2)),
        ({"alpha_pattern": {"q_proj": 2}}, (2 / 4, 8 / 4)),
        ({"alpha_pattern": {"model.layers.0.self_attn.q_proj": 2}}, (2 / 4, 8 / 4)),
        ({"alpha_pattern": {"^model.layers.0.*": 2}}, (2 / 4, 8 / 4)),
        ({"alpha_pattern": {"proj": 2}}, (8 / 4, 8 / 4)),  # no whole part of a name
        ({"alpha_pattern": None, "rank_pattern": None}, (8 / 4, 8 / 4)),
    ],
)
def test_the_scale_is_that_of_peft(adapter, base, settings, scales):
    change(adapter, **settings)
    lora = read_lora(adapter, base)
    for layer, scale in enumerate(scales):
        module = f"model.layers.{layer}.self_attn.{'q_proj' if layer == 0 else 'k_proj'}"
        assert torch.allclose(delta(lora, module), scale * written(adapter, module), atol=1e-6)


def test_ranks_may_differ_from_layer_to_layer(adapter, base):
    def widen(tensors: Tensors) -> None:
        tensors[f"{Q0}.lora_A.weight"] = torch.ones(9, 128)
        tensors[f"{Q0}.lora_B.weight"] = torch.ones(128, 9)

    change(adapter, widen, rank_pattern={r"layers\.0\.self_attn\.q_proj": 9}, use_rslora=True)
    lora = read_lora(adapter, base)
    assert lora.rank == 9
    found = delta(lora, "model.layers.0.self_attn.q_proj")[0, 0].item()
    assert found == pytest.approx(9 * 8 / math.sqrt(9))


def test_what_merges_is_w_plus_s_b_a(adapter, base):
    lora, module = read_lora(adapter, base), "model.layers.1.mlp.up_proj"
    weight = base.tensor(f"{module}.weight")
    wanted = weight.float() + 2 * written(adapter, module)
    assert torch.allclose(lora.merged(module, weight), wanted, atol=1e-5)
    assert torch.equal(lora.merged("lm_head", weight), weight.float())


def test_the_name_of_the_whole_model_may_lack(adapter, base):
    """As where PEFT ran the model without its head."""
    wanted = read_lora(adapter, base)
    change(adapter, lambda t: rename(t, "model.model.layers", "model.layers"))
    found = read_lora(adapter, base)
    assert found.modules.keys() == wanted.modules.keys()


def test_layers_that_are_stored_merged_are_cut(make_model, tmp_path):
    folder = make_model("phi3")
    base, generator = Checkpoint.open(folder), torch.Generator().manual_seed(0)
    name = "base_model.model.model.layers.{}.{}.lora_{}.weight"
    tensors: Tensors = {}
    for layer in range(2):
        for module, n, k in (("self_attn.qkv_proj", 256, 128), ("mlp.gate_up_proj", 512, 128)):
            tensors[name.format(layer, module, "A")] = torch.randn(4, k, generator=generator)
            tensors[name.format(layer, module, "B")] = torch.randn(n, 4, generator=generator)
    targets = ["qkv_proj", "gate_up_proj"]
    adapter = write_adapter(tmp_path / "phi3", folder, target_modules=targets)
    save_file(tensors, adapter / WEIGHTS)
    lora = read_lora(adapter, base)
    for layer in range(2):
        for module, parts in (
            ("self_attn.qkv_proj", ("q_proj", "k_proj", "v_proj")),
            ("mlp.gate_up_proj", ("gate_proj", "up_proj")),
        ):
            prefix = f"model.layers.{layer}.{module.rpartition('.')[0]}"
            found = torch.cat([delta(lora, f"{prefix}.{part}") for part in parts])
            wanted = 2 * written(adapter, f"model.layers.{layer}.{module}")
            assert torch.allclose(found, wanted, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"peft_type": "PROMPT_TUNING"}, "peft_type is 'PROMPT_TUNING'"),
        ({"use_dora": True}, "use_dora is True: DoRA"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is True"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"lora_bias": True}, "lora_bias is True"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is ['lm_head']"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices is [1]"),
        ({"target_parameters": ["mlp.experts.down_proj"]}, "target_parameters is"),
        ({"layer_replication": [[0, 2]]}, "layer_replication is"),
        ({"use_qalora": True}, "use_qalora is True"),
        ({"kasa_config": {"beta": 1}}, "kasa_config is"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
    ],
)
def test_other_adapters_are_refused_with_what_to_do(adapter, base, settings, words):
    change(adapter, **settings)
    with pytest.raises(CheckpointError) as caught:
        read_lora(adapter, base)
    text = str(caught.value)
    assert words in text
    assert "adapter_config.json" in text
    assert "Allowed are LoRA and rsLoRA" in text
    assert "merge_and_unload" in text


@pytest.mark.parametrize("begin", [True, False, "gaussian", "eva"])
def test_how_a_and_b_began_says_nothing(adapter, base, begin):
    change(adapter, init_lora_weights=begin)
    assert read_lora(adapter, base).modules


def drop(*names: str) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        for name in names:
            del tensors[name]

    return edit


def put(name: str, *shape: int, value: float = 1.0, dtype=torch.float32):
    def edit(tensors: Tensors) -> None:
        tensors[name] = torch.full(shape, value).to(dtype)

    return edit


def twice(tensors: Tensors) -> None:
    for name in [name for name in tensors if Q0 in name]:
        tensors[name.replace("model.model.", "model.")] = tensors[name].clone()


BROKEN: dict[str, tuple[Callable[[Tensors], Any] | dict[str, Any], str]] = {  # edits or settings
    "A without B": (drop(f"{Q0}.lora_B.weight"), "q_proj has lora_A.weight, and lora_B.weight"),
    "B without A": (drop(f"{Q0}.lora_A.weight"), "q_proj has lora_B.weight, and lora_A.weight"),
    "a layer": (
        drop(f"{Q0}.lora_A.weight", f"{Q0}.lora_B.weight"),
        "model.layers.0.self_attn.q_proj, one of target_modules",
    ),
    "an extra tensor": (put("base_model.model.extra", 2), "base_model.model.extra is not"),
    "an embedding": (
        put("base_model.model.model.embed_tokens.lora_embedding_A", 4, 384),
        "(of an embedding) is not expected",
    ),
    "a whole embedding": (
        put("base_model.model.model.embed_tokens.weight", 384, 128),
        "embed_tokens.weight (a weight of the base itself, saved beside the adapter) is not",
    ),
    "DoRA": (put(f"{Q0}.lora_magnitude_vector", 128), "(of DoRA) is not expected"),
    "no target": ({"target_modules": ["k_proj"]}, "is none of target_modules"),
    "rank": ({"r": 8}, "rank 4 in A and 4 in B, and adapter_config.json says 8"),
    "rank of B": (put(f"{Q0}.lora_B.weight", 128, 3), "q_proj has rank 4 in A and 3 in B"),
    "inputs": (
        put(f"{Q0}.lora_A.weight", 4, 96),
        "q_proj has 96 inputs and 128 outputs, and the layer of",
    ),
    "outputs": (put(f"{Q0}.lora_B.weight", 130, 4), "it is of another base"),
    "NaN": (put(f"{Q0}.lora_A.weight", 4, 128, value=math.nan), "holds NaN or infinity"),
    "infinity": (put(f"{Q0}.lora_B.weight", 128, 4, value=math.inf), "holds NaN or infinity"),
    "integers": (
        put(f"{Q0}.lora_B.weight", 128, 4, dtype=torch.int8),
        "needed is a matrix of float32",
    ),
    "a vector": (put(f"{Q0}.lora_B.weight", 128), "needed is a matrix"),
    "no tensors": (lambda tensors: tensors.clear(), "holds no tensors"),
    "twice": (twice, "is there under two names"),
    "alpha": ({"lora_alpha": "16"}, "lora_alpha is '16'"),
    "r": ({"r": 0}, "r is 0"),
    "a pattern": ({"rank_pattern": {"(": 4}}, "is no regular expression"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_what_is_wrong_is_named(adapter, base, fault):
    broken, words = BROKEN[fault]
    edit, settings = (None, broken) if isinstance(broken, dict) else (broken, {})
    change(adapter, edit, **settings)
    with pytest.raises(CheckpointError) as caught:
        read_lora(adapter, base)
    assert words in str(caught.value)
    assert str(adapter) in str(caught.value)


def test_a_part_of_the_blocks_may_have_one(adapter, base):
    def first_alone(tensors: Tensors) -> None:
        for name in [name for name in tensors if ".layers.1." in name]:
            del tensors[name]

    change(adapter, first_alone)
    refused(r"has no adapter in .* \(7 of 14 layers\)", read_lora, adapter, base)
    change(adapter, layers_to_transform=[0])
    assert len(read_lora(adapter, base).modules) == 7


@pytest.mark.parametrize(
    ("family", "module", "words"),
    [
        ("llama", "lm_head", "lm_head is the LM head, on which adapters do not run"),
        ("llama", "model.embed_tokens", "model.embed_tokens is the embedding, on which"),
        ("llama", "model.norm", "is no linear layer of a block, on which adapters do not run"),
        ("llama", "model.layers.7.mlp.up_proj", "is not among the layers of"),
        ("mixtral", "model.layers.0.block_sparse_moe.gate", "a router of a mixture"),
        ("mixtral", "model.layers.0.block_sparse_moe.experts.0.w1", "an expert of a mixture"),
        ("qwen2_moe", "model.layers.0.mlp.shared_expert.up_proj", "an expert of a mixture"),
        ("deepseek_v2", "model.layers.0.self_attn.kv_b_proj", "multiplied with queries"),
    ],
)
def test_layers_that_adapters_do_not_run_on(make_model, tmp_path, family, module, words):
    folder = make_model(family, **({"tie_word_embeddings": False} if family == "llama" else {}))
    adapter = write_adapter(tmp_path / "adapter", folder, target_modules=None)
    tensors = {
        f"base_model.model.{module}.lora_A.weight": torch.ones(4, 128),
        f"base_model.model.{module}.lora_B.weight": torch.ones(128, 4),
    }
    save_file(tensors, adapter / WEIGHTS)
    refused(re.escape(words), read_lora, adapter, Checkpoint.open(folder))


@pytest.mark.parametrize("file", ["adapter_config.json", WEIGHTS])
def test_a_missing_file_is_named(adapter, base, file):
    (adapter / file).unlink()
    refused(f"found no {file}", read_lora, adapter, base)


def test_pickles_are_refused(adapter, base):
    (adapter / WEIGHTS).rename(adapter / "adapter_model.bin")
    refused("pickled weights.*safe_serialization=True", read_lora, adapter, base)


def test_a_folder_that_is_none(adapter, base, tmp_path):
    refused("no such folder; did you mean", read_lora, tmp_path / "adaptor", base)
    refused("is a file; give the folder of an adapter", read_lora, adapter / WEIGHTS, base)
    (adapter / WEIGHTS).write_bytes((adapter / WEIGHTS).read_bytes()[:-4])
    refused("not a whole safetensors file", read_lora, adapter, base)


@pytest.mark.parametrize(
    ("trained_on", "warns"), [("org/tiny", False), ("/x/tiny", False), ("org/other", True)]
)
def test_another_base_by_name_is_told(tiny_llama, tmp_path, caplog, trained_on, warns):
    folder = edit_model(tiny_llama, tmp_path / "base", _name_or_path="me/tiny")
    adapter = write_adapter(tmp_path / "a", folder, base_model_name_or_path=trained_on)
    with caplog.at_level(logging.WARNING, "ptq.formats"):
        read_lora(adapter, Checkpoint.open(folder))
    assert [r.getMessage() for r in caplog.records] == warns * [
        f"{adapter} was trained on {trained_on}, and {folder} is me/tiny: check that they are the "
        "same model"
    ]


def test_an_adapter_of_the_hub(adapter, base, tmp_path, monkeypatch):
    """It is downloaded, and the copy in the cache serves when the hub does not."""
    with serve_hub() as server:
        server.add("org/adapter", adapter)
        point_at(server, tmp_path / "cache", monkeypatch)
        found = read_lora("org/adapter", base)
    _download.cache_clear()
    again = read_lora("org/adapter", base)
    _download.cache_clear()
    assert found.path == again.path != adapter
    assert found.modules.keys() == again.modules.keys()
