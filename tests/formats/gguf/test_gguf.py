"""GGUF files of every architecture that is written, and back: the same model, tensor by tensor.

That llama.cpp gives these files the logits of the engine was measured when this was written
(`formats/README.md`), and of some is tested in `test_beside_llama_cpp.py` where it is installed; what
lies otherwise there than here is tested against its definition.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, trainers

from formats import scheme as schemes
from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError, PTQError, RequestError
from formats.gguf.file import GgufFile
from formats.gguf.locate import locate_model
from formats.gguf.tokenizer import RULES, cuts_by
from formats.gguf.unpack import unpack
from inference import predict
from inference.bench import command as bench
from inference.bench import requests
from inference.engine import Engine
from ptq.commands import convert as command
from ptq.commands import inspect
from ptq.convert.convert import convert, describe
from ptq.recipe.reading import load_recipe
from tests.conftest import write_quantized
from tests.families import divergence
from tests.inference.conftest import EngineHere
from tests.inference.parallel.thread_ranks import thread_engine
from tests.refusals import refused_checkpoint as refused
from tests.test_import_order import ROOT
from tests.tiny_families import TINY

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
MODELS: dict[str, dict] = {
    "llama": {"rope_parameters": LLAMA3, "tie_word_embeddings": False},
    "mistral": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen2": {},
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 128, "norm_topk_prob": False},
    "qwen3": {},
    "qwen3_moe": EXPERTS | {"norm_topk_prob": True},
    "gemma2": TINY["gemma2"] | {"query_pre_attn_scalar": 32},
    "gemma3_text": {"sliding_window": 24, "query_pre_attn_scalar": 32, "layers": 6},
    "phi3": {},
    "olmo2": {},
    "glm4": {},
}


def ids() -> list[int]:
    return torch.randint(1, 380, (60,), generator=torch.Generator().manual_seed(3)).tolist()


def logits(folder: Path) -> torch.Tensor:
    return Engine.from_pretrained(folder).score(ids())


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_comes_back(make_model, tmp_path, kind):
    source, file = make_model(kind, **MODELS[kind]), tmp_path / "m.gguf"
    done = convert(source, file, "gguf")
    assert done.notes[0].startswith("Tensors: ")
    assert describe(done, file, "gguf")[0] == f"{file}: a float model"
    unpack(file, tmp_path / "back")
    before, after = Checkpoint.open(source), Checkpoint.open(tmp_path / "back")
    names = set(before.names())
    assert set(after.names()) - {"lm_head.weight"} == names - {"lm_head.weight"}
    for name in names:
        assert torch.equal(before.tensor(name).float(), after.tensor(name).float()), name
    assert torch.equal(logits(source), logits(tmp_path / "back"))


def test_rows_of_q_and_k_and_norms_lie_as_llama_cpp_has_them(make_model, tmp_path):
    """Of a head of 32, channels i and i + 16 become neighbours; 1 + w of Gemma is stored."""
    source = make_model("llama")
    convert(source, tmp_path / "m.gguf", "gguf")
    q = Checkpoint.open(source).tensor("model.layers.0.self_attn.q_proj.weight").view(4, 32, -1)
    data = GgufFile(tmp_path / "m.gguf").tensors["blk.0.attn_q.weight"].data
    found = torch.from_numpy(data.copy()).view(torch.bfloat16).view(4, 32, -1)
    assert torch.equal(found[:, 0::2], q[:, :16])
    assert torch.equal(found[:, 1::2], q[:, 16:])
    gemma = make_model("gemma2", **MODELS["gemma2"])
    convert(gemma, tmp_path / "g.gguf", "gguf")
    norm = Checkpoint.open(gemma).tensor("model.layers.0.post_feedforward_layernorm.weight")
    stored = GgufFile(tmp_path / "g.gguf").tensors["blk.0.post_ffw_norm.weight"].data
    assert np.array_equal(stored, 1 + norm.float().numpy())


@pytest.mark.parametrize(
    ("preset", "kind"), [("w8", "Q8_0"), ("a8w8c8", "Q8_0"), ("w4_g32", "Q4_0")]
)
def test_integers_go_there_and_come_back(make_model, tmp_path, preset, kind, monkeypatch):
    spec = schemes.WeightSpec(dtype="int4", granularity="group", group_size=32)
    monkeypatch.setitem(schemes.PRESETS, "w4_g32", schemes.Scheme(weights=spec))
    source = write_quantized(make_model("llama"), tmp_path / "q", preset)
    done = convert(source, tmp_path / "m.gguf", "gguf")
    lines = describe(done, tmp_path / "m.gguf", "gguf")
    assert "14 quantized layers" in lines[0]
    assert any("scales are left out" in line for line in lines) == (preset == "a8w8c8")
    file = GgufFile(tmp_path / "m.gguf")
    assert sum(stored.kind == kind for stored in file.tensors.values()) == 14
    assert unpack(tmp_path / "m.gguf", tmp_path / "back").kept == 14
    before, after = Checkpoint.open(source), Checkpoint.open(tmp_path / "back")
    assert after.scheme.weights.symmetric
    for module in before.quantized_modules:
        old, new = before.weight(module), after.weight(module)
        steps = (old.q.unflatten(1, (-1, 32)), new.q.unflatten(1, (-1, 32)))
        used = (steps[0] != 0).any(-1)
        assert torch.equal(steps[0][used], steps[1][used])
        scale = old.scale.repeat_interleave(new.scale.shape[1] // old.scale.shape[1], 1)
        torch.testing.assert_close(scale[used], new.scale[used], rtol=2**-11, atol=0)


def six_bits(rows: int, columns: int) -> np.ndarray:
    """Random blocks of Q6_K, which the package gguf does not write."""
    blocks = np.random.default_rng(0).integers(0, 256, (rows, columns // 256, 210), dtype=np.uint8)
    blocks[..., 208:] = np.array([2e-5], np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)


def quantized_file(source: Path, out: Path, kinds: dict[str, str], name: str = "llama") -> Path:
    """A file whose matrices are rounded by the package gguf, by the ends of their names."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(out, name)
    for key, field in reader.fields.items():
        if not key.startswith(("GGUF.", "general.architecture")):
            kind = field.types[0]
            sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), kind, sub)
    for tensor in reader.tensors:
        kind = next((own for end, own in kinds.items() if tensor.name.endswith(end)), None)
        if kind is None or tensor.tensor_type.name == "F32":
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
            continue
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        own = gguf.GGMLQuantizationType[kind]
        data = six_bits(*values.shape) if kind == "Q6_K" else gguf.quantize(values, own)
        writer.add_tensor(tensor.name, data, raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


@pytest.fixture(scope="module")
def llama_file(make_model, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "llama.gguf"
    convert(make_model("llama"), path, "gguf")
    return path


def test_mixed_types_run_on_what_holds_them(llama_file, tmp_path):
    """q, k and v run as one: int8 holds Q4_0 and Q8_0; a float beside makes floats of all."""
    kinds = {"attn_q.weight": "Q4_0", "attn_k.weight": "Q8_0", "attn_v.weight": "Q5_0"}
    kinds |= {"blk.1.ffn_up.weight": "BF16", "ffn_gate.weight": "Q4_0", "ffn_up.weight": "Q4_1"}
    kinds |= {"ffn_down.weight": "Q5_1", "attn_output.weight": "Q4_1", "token_embd.weight": "Q8_0"}
    file = quantized_file(llama_file, tmp_path / "mixed.gguf", kinds)
    done = unpack(file, tmp_path / "folder")
    assert done.kept == 2 * 5 + 2 + 1
    assert done.dequantized == {"Q4_0": 1}
    floats = unpack(file, tmp_path / "floats", floats=True)
    assert floats.kept == 0
    checkpoint = Checkpoint.open(tmp_path / "folder")
    layer = "model.layers.0.self_attn"
    q, v = (checkpoint.scheme_of(f"{layer}.{leaf}_proj") for leaf in "qv")
    assert q.text == v.text
    wide, narrow, gate = (
        checkpoint.scheme_of(f"model.layers.0.mlp.{leaf}_proj").weights
        for leaf in ("down", "up", "gate")
    )
    kind = "weights group of 32, asymmetric, float zero points"
    assert (wide.text, narrow.text) == (f"int8 {kind}", f"int4 {kind}")
    assert gate == narrow
    assert checkpoint.shares_head
    assert divergence(logits(tmp_path / "folder"), logits(tmp_path / "floats")) < 1e-5


def test_six_bits_run_as_integers_in_groups_of_16(make_model, tmp_path):
    sizes = {"hidden_size": 256, "intermediate_size": 256}
    convert(make_model("llama", **sizes), tmp_path / "plain.gguf", "gguf")
    kinds = {"ffn_down.weight": "Q6_K", "attn_v.weight": "Q6_K", "attn_q.weight": "Q4_1"}
    kinds |= {"attn_k.weight": "Q4_0", "token_embd.weight": "Q6_K"}
    file = quantized_file(tmp_path / "plain.gguf", tmp_path / "six.gguf", kinds)
    done = unpack(file, tmp_path / "folder")
    assert not done.dequantized
    unpack(file, tmp_path / "floats", floats=True)
    checkpoint = Checkpoint.open(tmp_path / "folder")
    texts = [
        checkpoint.scheme_of(f"model.layers.0.{name}").weights.text
        for name in ("mlp.down_proj", "self_attn.q_proj")
    ]
    fine = "int8 weights group of 16"
    assert texts == [fine, f"{fine}, asymmetric, float zero points"]
    assert divergence(logits(tmp_path / "folder"), logits(tmp_path / "floats")) < 1e-5
    again = convert(tmp_path / "folder", tmp_path / "again.gguf", "gguf")
    tensors = GgufFile(tmp_path / "again.gguf").tensors
    assert tensors["blk.0.ffn_down.weight"].kind == "BF16"
    blocks = [name for name, tensor in tensors.items() if tensor.kind.startswith("Q")]
    assert again.modules == len(blocks) < len(checkpoint.quantized_modules)
    lost = len(checkpoint.quantized_modules) - len(blocks)
    assert any(note.startswith(f"{lost} more quantized layers") for note in again.notes)


def test_minima_go_back_into_a_file_and_into_no_other_layout(llama_file, tmp_path):
    kinds = {"attn_q.weight": "Q4_1", "ffn_down.weight": "Q4_1", "attn_v.weight": "Q5_1"}
    file = quantized_file(llama_file, tmp_path / "a.gguf", kinds | {"attn_k.weight": "Q4_1"})
    done = convert(file, tmp_path / "folder", "compressed_tensors")
    assert [note for note in done.notes if "Only this runtime opens it" in note]
    convert(tmp_path / "folder", tmp_path / "b.gguf", "gguf")
    a, b = (GgufFile(tmp_path / name).tensors for name in ("a.gguf", "b.gguf"))
    down = "blk.0.ffn_down.weight"
    assert (a[down].kind, b[down].kind) == ("Q4_1", "Q4_1")
    assert np.array_equal(a[down].data, b[down].data)
    assert b["blk.0.attn_v.weight"].kind == "BF16"  # no type has its 5 bits in int8
    with closing(thread_engine(tmp_path / "folder", 2)) as ranks:
        found = ranks.score(ids())
    torch.testing.assert_close(found, logits(tmp_path / "folder"), atol=2e-4, rtol=0)
    for target in ("awq", "gptq", "paddle"):
        with pytest.raises(CheckpointError, match=r"float zero points.*with --to float"):
            convert(tmp_path / "folder", tmp_path / "out", target)


def test_floats_of_a_file_have_the_type_that_is_asked_for(llama_file, tmp_path):
    convert(llama_file, tmp_path / "m", "float", dtype="float32")
    checkpoint = Checkpoint.open(tmp_path / "m")
    assert checkpoint.config["dtype"] == "float32"
    assert {checkpoint.dtype(name) for name in checkpoint.names()} == {torch.float32}
    with pytest.raises(RequestError, match="dtype: found 'int8'; allowed: bfloat16"):
        convert(llama_file, tmp_path / "n", "float", dtype="int8")


def test_gemma_runs_in_bf16_whatever_its_floats_are(make_model, tmp_path):
    """Its hidden states leave the range of fp16, in which dequantized weights are stored."""
    convert(make_model("gemma2", **MODELS["gemma2"]), tmp_path / "m.gguf", "gguf")
    file = quantized_file(tmp_path / "m.gguf", tmp_path / "q.gguf", {"weight": "Q4_1"}, "gemma2")
    unpack(file, tmp_path / "folder", floats=True)
    checkpoint = Checkpoint.open(tmp_path / "folder")
    assert checkpoint.config["dtype"] == "bfloat16"
    assert checkpoint.dtype("model.layers.0.self_attn.q_proj.weight") == torch.float16


def test_commands_take_the_file_itself(llama_file, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PTQ_CACHE", str(tmp_path / "cache"))
    folder = locate_model(llama_file)
    assert locate_model(str(llama_file)) == folder
    assert folder.is_relative_to(tmp_path / "cache" / "gguf")
    assert locate_model(llama_file, floats=True) != folder
    found = Engine.from_pretrained(llama_file).generate(["def add("])[0].token_ids
    assert found == Engine.from_pretrained(folder).generate(["def add("])[0].token_ids
    assert command.main([str(llama_file), str(tmp_path / "made"), "--quiet"]) == 0
    assert command.main([str(tmp_path / "made"), str(tmp_path / "again.gguf"), "--quiet"]) == 0
    assert (tmp_path / "again.gguf").stat().st_size == llama_file.stat().st_size
    assert predict.main([str(llama_file), "--prompt", "def", "--max-tokens", "4"]) == 0
    assert capsys.readouterr().out
    monkeypatch.setenv("PTQ_CACHE", str(tmp_path / "another"))
    words = ["--prompt", "def", "--max-tokens", "4", "--quiet"]
    assert predict.main([str(llama_file), *words]) == 0
    assert "Reading" not in capsys.readouterr().err
    monkeypatch.setattr(requests, "EngineProcess", EngineHere)
    given = [str(llama_file), "--batch", "1", "--prompt", "4", "--new", "2"]
    assert bench.main([*given, "--repeats", "1", "--against", str(llama_file)]) == 0
    assert "decode at " in capsys.readouterr().out


def test_inspect_does_not_say_of_a_file_that_others_cannot_open_it(
    llama_file, tmp_path, monkeypatch, capsys
):
    """They open it; what is made of it here is for this runtime alone."""
    monkeypatch.setenv("PTQ_CACHE", str(tmp_path / "cache"))
    file = quantized_file(llama_file, tmp_path / "q.gguf", {"weight": "Q4_1"})
    assert inspect.main([str(file)]) == 0
    assert "Only this runtime" not in capsys.readouterr().out
    assert inspect.main([str(locate_model(file))]) == 0
    assert "Only this runtime opens it" in capsys.readouterr().out


def test_a_template_is_utf_8_wherever_it_is_read(make_model, tmp_path):
    shutil.copytree(make_model("llama"), tmp_path / "m")
    (tmp_path / "m" / "chat_template.jinja").write_text("<｜User｜>", encoding="utf-8")
    words = ["-m", "ptq", "convert", str(tmp_path / "m"), str(tmp_path / "m.gguf"), "--quiet"]
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, *words], cwd=ROOT, env=os.environ | plain, check=True)
    found = gguf.GGUFReader(tmp_path / "m.gguf").fields["tokenizer.chat_template"]
    assert found.contents() == "<｜User｜>"


def test_a_recipe_quantizes_the_floats_of_a_file(llama_file, tmp_path, monkeypatch):
    monkeypatch.setenv("PTQ_CACHE", str(tmp_path / "cache"))
    recipe = load_recipe("w8_rtn", [f"model.path={llama_file}"])
    assert recipe.model.path == llama_file
    assert Checkpoint.open(recipe.model.folder).quantized_modules == ()


TEXTS = [
    "def add(a, b):\n    return a + b  # 123 don't",
    "  two  spaces\n\n\ttab é 中文 😀 \u200d",
    "<|endoftext|>x = '\\n'",
]


def test_a_byte_level_tokenizer_comes_back(make_model, llama_file, tmp_path):
    before = Tokenizer.from_file(str(make_model("llama") / "tokenizer.json"))
    unpack(llama_file, tmp_path / "folder")
    after = Tokenizer.from_file(str(tmp_path / "folder" / "tokenizer.json"))
    for text in TEXTS:
        assert before.encode(text).ids == after.encode(text).ids
        assert after.decode(after.encode(text).ids, skip_special_tokens=False) == text


def test_a_sentencepiece_tokenizer_comes_back(make_model, tmp_path):
    """BPE that falls back to bytes is written as scores, and merges are found again from these."""
    made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Replace(" ", "\u2581")
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=384, special_tokens=special, show_progress=False)
    made.train_from_iterator(TEXTS * 20, trainer)
    document = json.loads(made.to_str())
    document["added_tokens"] = document["added_tokens"][:3]
    source = shutil.copytree(make_model("llama"), tmp_path / "source")
    (source / "tokenizer.json").write_text(json.dumps(document))
    convert(source, tmp_path / "m.gguf", "gguf")
    file = GgufFile(tmp_path / "m.gguf")
    assert file.metadata["tokenizer.ggml.model"] == "llama"
    assert file.metadata["tokenizer.ggml.token_type"][3] == 6
    unpack(tmp_path / "m.gguf", tmp_path / "folder")
    before = Tokenizer.from_file(str(source / "tokenizer.json"))
    after = Tokenizer.from_file(str(tmp_path / "folder" / "tokenizer.json"))
    for text in TEXTS:
        assert before.encode(text).ids == after.encode(text, add_special_tokens=False).ids


def test_rules_cut_words_as_their_names_say():
    text = "I've 12345 x=1\n\n  y"
    assert cuts_by(RULES["llama-bpe"], text)[:4] == ["I", "'ve", "Ġ", "123"]
    assert cuts_by(RULES["qwen2"], text)[2:5] == ["Ġ", "1", "2"]
    assert cuts_by(RULES["gpt-2"], text)[2] == "Ġ12345"
    assert cuts_by(RULES["smollm"], text)[2:5] == ["Ġ", "1", "2"]


def test_a_rule_that_llama_cpp_has_not_is_told(make_model, tmp_path):
    source = shutil.copytree(make_model("llama"), tmp_path / "source")
    document = json.loads((source / "tokenizer.json").read_bytes())
    split = {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": False}
    whole = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    whole["trim_offsets"] = True
    document["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, whole]}
    (source / "tokenizer.json").write_text(json.dumps(document))
    done = convert(source, tmp_path / "m.gguf", "gguf")
    assert "other tokens there" in done.notes[-1]


WORDS = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(pre_tokenizer=None), "a BPE of characters"),
        (lambda d: d.update(model=WORDS, added_tokens=[]), "of the kind WordLevel"),
    ],
)
def test_tokenizers_of_other_kinds_are_refused(make_model, tmp_path, change, message):
    source = shutil.copytree(make_model("llama"), tmp_path / "source")
    document = json.loads((source / "tokenizer.json").read_bytes())
    change(document)
    (source / "tokenizer.json").write_text(json.dumps(document))
    refused(message, convert, source, tmp_path / "m.gguf", "gguf")


def test_what_was_written_is_read_back_and_compared(make_model, tmp_path, monkeypatch):
    write = gguf.GGUFWriter.write_tensor_data
    zeros = lambda own, x: write(own, np.zeros_like(x))  # noqa: E731
    monkeypatch.setattr(gguf.GGUFWriter, "write_tensor_data", zeros)
    with pytest.raises(CheckpointError, match="read back with other bits"):
        convert(make_model("llama"), tmp_path / "new" / "m.gguf", "gguf")
    assert not list(tmp_path.rglob("*gguf*"))


def replaced(old: bytes, new: bytes):
    assert len(old) == len(new)

    def change(data: bytearray) -> None:
        at = data.index(old)
        data[at : at + len(old)] = new

    return change


CHANGES = {
    "does not begin as a GGUF file": replaced(b"GGUF", b"GGML"),
    "found big-endian numbers": replaced(b"GGUF\3\0\0\0", b"GGUF\0\0\0\3"),
    "it is damaged": lambda data: data.__delitem__(slice(-5000, None)),
    "found the architecture 'lloma'": replaced(b"\5\0\0\0\0\0\0\0llama", b"\5\0\0\0\0\0\0\0lloma"),
    "llama.block_count is missing": replaced(b"llama.block_count", b"llama.block_cound"),
    "found the tensor blk.0.attn_x.weight": replaced(b"blk.0.attn_q.w", b"blk.0.attn_x.w"),
    "token_embd.weight is missing": replaced(b"token_embd.weight", b"token_embx.weight"),
    "found the rule 'gpt-9'": replaced(b"gpt-2", b"gpt-9"),
    "found a tokenizer of the kind 'gptx'": replaced(b"gpt2", b"gptx"),
}


@pytest.mark.parametrize("message", CHANGES)
def test_what_is_not_read_is_refused_by_name(llama_file, tmp_path, message):
    data, path = bytearray(llama_file.read_bytes()), tmp_path / "bad.gguf"
    CHANGES[message](data)
    path.write_bytes(data)
    refused(re.escape(message), unpack, path, tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


def test_what_is_not_written_is_refused_by_name(make_model, tmp_path, llama_file):
    cases = {
        "found query_pre_attn_scalar 48": ("gemma2", {"query_pre_attn_scalar": 48}),
        "layer_types of another pattern": (
            "gemma3_text",
            {"query_pre_attn_scalar": 32, "layer_types": ["full_attention", "sliding_attention"]},
        ),
        "found sliding_window 24": ("mistral", {"sliding_window": 24}),
        "found model_type 'granite'": ("granite", TINY["granite"]),
    }
    for message, (kind, overrides) in cases.items():
        refused(message, convert, make_model(kind, **overrides), tmp_path / "m.gguf", "gguf")
        assert not list(tmp_path.iterdir())
    refused(r"ends in \.gguf", convert, make_model("llama"), tmp_path / "folder", "gguf")
    (tmp_path / "m.gguf").write_bytes(b"mine")
    refused("exists", convert, make_model("llama"), tmp_path / "m.gguf", "gguf")
    assert (tmp_path / "m.gguf").read_bytes() == b"mine"
    refused("found --to awq", convert, llama_file, tmp_path / "folder", "awq")
    refused("a folder is needed", Checkpoint.open, llama_file.parent)


def test_a_damaged_file_ends_in_one_clear_error(llama_file, tmp_path):
    """Bytes of the head changed at random, or the end cut off: a folder or a refusal, no crash."""
    random = np.random.default_rng(0)
    whole = llama_file.read_bytes()
    head = whole.index(b"blk.1.") + 400
    ends = {"folder": 0, "refusal": 0}
    for case in range(int(os.environ.get("CASES", "60"))):
        data = bytearray(whole)
        for _ in range(random.integers(1, 4)):
            data[random.integers(0, (head, len(data))[case % 2])] = random.integers(0, 256)
        if case % 5 == 0:
            del data[random.integers(0, len(data)) :]
        path = tmp_path / f"{case}.gguf"
        path.write_bytes(data)
        try:
            unpack(path, tmp_path / f"folder{case}")
            ends["folder"] += 1
        except PTQError:
            ends["refusal"] += 1
        path.unlink()
    assert min(ends.values()) > 5
