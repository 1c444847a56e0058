"""Damaged, hostile and half-written checkpoints: one clear error each, and nothing left behind."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError
from inference.engine import Engine
from tests.conftest import write_quantized

ROOT = Path(__file__).resolve().parents[2]
UP = "model.layers.1.mlp.up_proj"
ATTENTION = "model.layers.0.self_attn"


@pytest.fixture
def folder(make_quantized, tiny_llama, tmp_path) -> Path:
    """A good a8w8c8 checkpoint to damage, without its manifest."""
    copy = tmp_path / "checkpoint"
    shutil.copytree(make_quantized(tiny_llama), copy)
    (copy / "quant" / "manifest.json").unlink()
    Checkpoint.open(copy)
    return copy


def refused(folder: Path, *words: str, verify: bool = False) -> None:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder, verify=verify)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert len(str(caught.value)) < 600


def edit_tensors(file: Path, change) -> None:
    tensors = load_file(file)
    change(tensors)
    kept = {"kv_cache": '{"dtype":"int8","granularity":"per_head"}'}
    save_file(tensors, file, metadata=kept)


def edit_json(file: Path, change) -> None:
    document = json.loads(file.read_text())
    change(document)
    file.write_text(json.dumps(document))


@pytest.mark.parametrize("keep", [0, 4, 8, 100, -1])
def test_truncated(folder, keep):
    weights = folder / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:keep])
    refused(folder, str(weights), "not a whole safetensors file")


def test_a_pointer_of_git_lfs(folder):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"
    (folder / "model.safetensors").write_text(pointer)
    refused(folder, "model.safetensors", "git lfs pull")


def test_shards_without_an_index(folder):
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    refused(folder, "model-00001-of-00001.safetensors needs its index")


def test_trailing_bytes(folder):
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"x")
    refused(folder, "model.safetensors", "not a whole safetensors file")


@pytest.mark.parametrize(
    "header", [b"not json", b"[]", b'{"a": {"dtype": "I4", "shape": [1], "data_offsets": [0, 1]}}']
)
def test_a_header_that_is_none(folder, header):
    data = len(header).to_bytes(8, "little") + header + b"\0"
    (folder / "model.safetensors").write_bytes(data)
    refused(folder, "model.safetensors", "header")


def test_overlapping_offsets(folder):
    row = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}
    header = json.dumps({"a": row, "b": row}).encode()
    data = len(header).to_bytes(8, "little") + header + b"\0" * 4
    (folder / "model.safetensors").write_bytes(data)
    refused(folder, "offsets")


@pytest.mark.parametrize("position", [-1, -1000, 5000])
def test_a_flipped_bit_is_found_when_asked_for(make_quantized, tiny_llama, tmp_path, position):
    copy = tmp_path / "checkpoint"
    shutil.copytree(make_quantized(tiny_llama), copy)
    data = bytearray((copy / "model.safetensors").read_bytes())
    data[position] ^= 1
    (copy / "model.safetensors").write_bytes(data)
    refused(copy, "model.safetensors", "SHA-256", verify=True)


def test_the_manifest_sees_what_is_missing_or_longer(make_quantized, tiny_llama, tmp_path):
    copy = tmp_path / "checkpoint"
    shutil.copytree(make_quantized(tiny_llama), copy)
    tokenizer = copy / "tokenizer.json"
    tokenizer.write_bytes(tokenizer.read_bytes() + b" ")
    refused(copy, "tokenizer.json", "bytes")
    tokenizer.unlink()
    refused(copy, "tokenizer.json", "missing")
    (copy / "model.safetensors").unlink()
    refused(copy, "model.safetensors is missing; quant/manifest.json lists it. Copy the checkpoint")


@pytest.mark.parametrize("preset", ["a8w8c8", "c8", "a8w8"])
def test_a_lost_quant_folder_is_missed(make_quantized, tiny_llama, tmp_path, preset):
    """config.json says that a quantized cache belongs to the checkpoint, and that it has a manifest."""
    copy = tmp_path / "checkpoint"
    shutil.copytree(make_quantized(tiny_llama, preset), copy)
    shutil.rmtree(copy / "quant")
    if "c8" in preset:
        found = ("int8 per_head belongs to", "kv_scales.safetensors is missing", "Copy")
        refused(copy, *found, "quantized_kv=False", "remove the key 'ptq' from config.json")
        with pytest.raises(CheckpointError, match="belongs to this checkpoint"):
            Engine.from_pretrained(copy)
    assert Checkpoint.open(copy, quantized_kv=False).scheme.kv_cache is None
    assert not Engine.from_pretrained(copy, quantized_kv=False).quantized_kv
    with pytest.raises(CheckpointError, match=r"quant/manifest.json is missing"):
        Checkpoint.open(copy, verify=True, quantized_kv=False)
    edit_json(copy / "config.json", lambda c: c.pop("ptq"))  # as the message says
    assert Checkpoint.open(copy, verify=True).scheme.kv_cache is None


def test_a_cache_of_another_checkpoint(make_quantized, tiny_llama, tmp_path):
    copy = tmp_path / "checkpoint"
    shutil.copytree(make_quantized(tiny_llama, "a8w8"), copy)
    shutil.copytree(make_quantized(tiny_llama) / "quant", copy / "quant", dirs_exist_ok=True)
    (copy / "quant" / "manifest.json").unlink()
    refused(copy, "'per_head'", "of two checkpoints")


def test_a_checkpoint_from_before_config_json_told_of_its_cache(folder):
    edit_json(folder / "config.json", lambda c: c.pop("ptq"))
    assert Checkpoint.open(folder).scheme.wac == "a8w8c8"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -0.5])
@pytest.mark.parametrize("name", [f"{UP}.weight_scale", f"{UP}.input_scale"])
def test_a_scale_that_is_none(folder, name, value):
    edit_tensors(folder / "model.safetensors", lambda t: t[name].view(-1)[:1].fill_(value))
    refused(folder, name, "finite and positive")


@pytest.mark.parametrize("value", [float("nan"), 0.0, -0.5])
def test_a_cache_scale_that_is_none(folder, value):
    name = f"{ATTENTION}.v_scale"
    edit_tensors(folder / "quant/kv_scales.safetensors", lambda t: t[name][1:].fill_(value))
    refused(folder, name, "finite and positive")


@pytest.mark.parametrize("suffix", ["weight_scale", "input_scale"])
def test_a_missing_scale(folder, suffix):
    edit_tensors(folder / "model.safetensors", lambda t: t.pop(f"{UP}.{suffix}"))
    refused(folder, f"{UP}.{suffix}", "missing")


def test_a_missing_cache_scale(folder):
    file = folder / "quant/kv_scales.safetensors"
    edit_tensors(file, lambda t: t.pop(f"{ATTENTION}.k_scale"))
    refused(folder, f"{ATTENTION}.k_scale", "missing")


@pytest.mark.parametrize("name", [f"{UP}.smooth_scale", "model.norm.weight_scale"])
def test_an_extra_scale(folder, name):
    edit_tensors(folder / "model.safetensors", lambda t: t.update({name: torch.ones(1)}))
    refused(folder, name, "not expected")


def test_a_layer_that_should_be_quantized_and_is_not(folder):
    def change(tensors):
        tensors[f"{UP}.weight"] = tensors[f"{UP}.weight"].bfloat16()

    edit_tensors(folder / "model.safetensors", change)
    refused(folder, UP, "missing")


@pytest.mark.parametrize(
    ("name", "shape"),
    [(f"{UP}.weight_scale", (256,)), (f"{UP}.weight_scale", (1, 1)), (f"{UP}.input_scale", (2,))],
)
def test_a_scale_of_another_shape(folder, name, shape):
    edit_tensors(folder / "model.safetensors", lambda t: t.update({name: torch.ones(shape)}))
    refused(folder, name, str(shape))


def test_a_cache_scale_of_another_shape(folder):
    name = f"{ATTENTION}.k_scale"
    file = folder / "quant/kv_scales.safetensors"
    edit_tensors(file, lambda t: t.update({name: torch.ones(3)}))
    refused(folder, name, "(3,)")


def test_scales_that_the_table_does_not_know(folder):
    name = f"{UP}.weight_scale"
    edit_tensors(folder / "model.safetensors", lambda t: t[name].mul_(2))
    refused(folder, name, "scale table")


@pytest.mark.parametrize("text", ["", "{", '{"entries": [{"module": "x"}]}', "[]"])
def test_a_damaged_scale_table(folder, text):
    (folder / "quant/scale_table.json").write_text(text)
    refused(folder, "scale table is damaged")


def test_a_table_with_a_row_too_many(folder):
    def change(document):
        document["entries"].append(document["entries"][0])

    edit_json(folder / "quant/scale_table.json", change)
    refused(folder, "more than once")


def test_pickled_weights_are_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n")
    refused(tmp_path, "pytorch_model.bin", "safe_serialization")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tiny-Q4 K_M.gguf", ("found a GGUF file", "tiny-Q4 K_M.gguf' FOLDER --to")),
        ("model.onnx", ("found ONNX", "the original model")),
        ("pytorch_model.bin", ("pickled", "safe_serialization")),
        ("consolidated.00.pth", ("pickled", "safe_serialization")),
        ("notes.md", ("is this a model folder?",)),
    ],
)
def test_other_formats_are_told_as_what_they_are(tmp_path, name, words):
    (tmp_path / name).write_bytes(b"GGUF")
    refused(tmp_path, *words)
    (tmp_path / "config.json").write_text("{}")  # such as repositories of GGUF files have
    refused(tmp_path, *words)
    refused(tmp_path / name, *(words if name != "notes.md" else ("found a file",)))


def test_code_of_the_models_own_is_refused(folder):
    edit_json(folder / "config.json", lambda c: c.update(auto_map={"AutoModel": "m.M"}))
    refused(folder, "trust_remote_code")


def test_no_model_at_all(tmp_path):
    refused(tmp_path / "absent", "no such folder")
    refused(tmp_path, "config.json", "is this a model folder?")
    (tmp_path / "adapter_config.json").touch()
    refused(tmp_path, "it holds an adapter", "--adapter")
    (tmp_path / "adapter_config.json").unlink()
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "config.json").write_text("{}")
    refused(tmp_path, "config.json", f"did you mean {tmp_path / 'checkpoint'}?")
    (tmp_path / "config.json").write_text("{")
    refused(tmp_path, "JSON")


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "link.safetensors"])
def test_an_index_that_leads_outside(folder, name):
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors, folder.parent / "outside.safetensors")
    (folder / "link.safetensors").symlink_to(folder.parent / "outside.safetensors")
    (folder / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, name)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(folder, name, "outside")


@pytest.mark.parametrize("damage", ["missing shard", "wrong shard", "unknown tensor", "no map"])
def test_an_index_that_is_wrong(tiny_llama, tmp_path, damage):
    out = write_quantized(tiny_llama, tmp_path / "out", "a8w8", shard_bytes=100_000)
    (out / "quant/manifest.json").unlink()
    shards = sorted(path.name for path in out.glob("model-*"))
    name = f"{UP}.weight"

    def change(index):
        if damage == "no map":
            del index["weight_map"]
        elif damage == "wrong shard":
            where = index["weight_map"][name]
            index["weight_map"][name] = next(shard for shard in shards if shard != where)
        elif damage == "unknown tensor":
            index["weight_map"]["model.ghost"] = shards[0]

    edit_json(out / "model.safetensors.index.json", change)
    culprit = {"wrong shard": name, "unknown tensor": "model.ghost"}.get(damage, "index.json")
    if damage == "missing shard":
        (out / shards[1]).unlink()
        culprit = shards[1]
    refused(out, culprit)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda q: q.update(quant_method="gptq"), "gptq"),
        (
            lambda q: q["config_groups"]["group_0"]["weights"].update(num_bits=4),
            "group_0.input_activations",
        ),
        (lambda q: q["config_groups"]["group_0"].update(targets=["Conv1d"]), "targets"),
        (lambda q: q["config_groups"]["group_0"].update(input_activations=None), "'int-quantized'"),
        (lambda q: q.update(config_groups={}), "0 config_groups"),
        (lambda q: q.update(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme"),
        (lambda q: q.update(transform_config={"a": 1}), "transform"),
    ],
)
def test_a_scheme_that_is_not_run_here(folder, change, word):
    edit_json(folder / "config.json", lambda c: change(c["quantization_config"]))
    refused(folder, word, "one of the shipped recipes")


@pytest.fixture
def small_disk(tmp_path):
    """A file system of two megabytes."""
    mount = tmp_path / "disk"
    mount.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(mount)], capture_output=True
    )
    if made.returncode:
        pytest.skip("mounting a small file system needs root")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


@pytest.mark.parametrize("already", [0, 600_000, 1_400_000, 1_600_000])
def test_a_full_disk(tiny_llama, small_disk, already):
    (small_disk / "other").write_bytes(b"\0" * already)
    (small_disk / "filler").write_bytes(b"\0" * (1_650_000 - already))
    with pytest.raises(CheckpointError, match="disk is full"):
        write_quantized(tiny_llama, small_disk / "out", "a8w8c8", shard_bytes=200_000)
    assert sorted(path.name for path in small_disk.iterdir()) == ["filler", "other"]


KILLED = """
import os, signal, sys, traceback
from pathlib import Path
from formats.checkpoint import read, write
from ptq.methods.common import rounding
from tests.conftest import write_quantized

def deadly(function, step, calls):
    def call(*arguments, **options):
        calls.append(1)
        if len(calls) == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)
    return call

def run(source, out, step):
    calls = []
    os.fsync, os.rename = deadly(os.fsync, step, calls), deadly(os.rename, step, calls)
    write_quantized(source, out, "a8w8c8", shard_bytes=200_000, force=True)

for line in sys.stdin:
    source, out, step = line.split()
    child = os.fork()
    if not child:
        try:
            run(Path(source), Path(out), int(step))
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def write_until():
    """Writes a checkpoint in a process that kills itself at a step: gives its exit code.

    All are forks of one that has imported what they need.
    """
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    server = subprocess.Popen(
        [sys.executable, "-c", KILLED], env=environment, text=True, bufsize=1, **pipes
    )

    def write(source: Path, out: Path, step: int) -> int:
        print(source, out, step, file=server.stdin, flush=True)
        return int(server.stdout.readline())

    yield write
    server.communicate()


@pytest.mark.parametrize("step", [1, 3, 5, 8, 11, 13, 15, 16, 17, 18, 19, 20, 21, 22, 40])
def test_kill_at_any_moment_leaves_a_whole_checkpoint_or_none(
    tiny_llama, tmp_path, write_until, step
):
    out = tmp_path / "out"
    replacing = step % 2 == 1
    if replacing:
        write_quantized(tiny_llama, out, "c8")
    code = write_until(tiny_llama, out, step)
    assert code in (0, -signal.SIGKILL)
    if code == 0:
        assert Checkpoint.open(out, verify=True).scheme.wac == "a8w8c8"
        assert step > 15
    elif out.exists():
        assert Checkpoint.open(out, verify=True).scheme.wac in ("c8", "a8w8c8")
    again = write_quantized(tiny_llama, out, "a8w8c8", force=True)
    assert Checkpoint.open(again, verify=True).scheme.wac == "a8w8c8"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
