"""Which links are followed: within a folder, and from a snapshot of a hub cache to its blobs."""

import os
import shutil
from pathlib import Path

import pytest

from formats.checkpoint.read import Checkpoint
from formats.checkpoint.write import CheckpointWriter
from formats.files import find_file
from formats.scale_table import ScaleTable
from formats.scheme import Scheme
from tests.conftest import write_quantized
from tests.refusals import refused_checkpoint as refused

KINDS = [
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "generation_config.json",
    "quant/kv_scales.safetensors",
    "quant/scale_table.json",
    "quant/manifest.json",
]


@pytest.fixture
def snapshot(make_quantized, tiny_llama, tmp_path) -> Path:
    """A quantized checkpoint as the hub's cache lays it out: every file a link to a blob."""
    model = tmp_path / "hub" / "models--acme--tiny"
    folder = model / "snapshots" / "0f5e1c"
    (model / "blobs").mkdir(parents=True)
    shutil.copytree(make_quantized(tiny_llama), folder)
    for file in [file for file in folder.rglob("*") if file.is_file()]:
        blob = model / "blobs" / f"sha-{file.name}"
        file.rename(blob)
        file.symlink_to(os.path.relpath(blob, file.parent))
    return folder


def test_a_snapshot_of_a_hub_cache_is_read(snapshot, tmp_path):
    assert Checkpoint.open(snapshot, verify=True).scheme.wac == "a8w8c8"
    (tmp_path / "link").symlink_to(snapshot)
    assert Checkpoint.open(tmp_path / "link", verify=True).scheme.wac == "a8w8c8"


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("ours", [True, False])
def test_a_link_out_of_the_cache_is_refused(snapshot, tmp_path, name, ours):
    """Also to another model's blobs, and where no manifest lists it."""
    file = snapshot / name
    if not ours and name != "quant/manifest.json":
        (snapshot / "quant/manifest.json").unlink()
    for elsewhere in (tmp_path / "elsewhere", tmp_path / "hub" / "models--acme--other" / "blobs"):
        elsewhere.mkdir(parents=True)
        target = elsewhere / file.name
        shutil.copy(file, target)
        file.unlink()
        file.symlink_to(target)
        refused("is outside of this folder", Checkpoint.open, snapshot)


@pytest.mark.parametrize("name", KINDS)
def test_a_link_within_a_folder_is_followed(make_quantized, tiny_llama, tmp_path, name):
    folder = tmp_path / "checkpoint"
    shutil.copytree(make_quantized(tiny_llama), folder)
    (folder / "stored").mkdir()
    (folder / name).rename(folder / "stored" / "file")
    (folder / name).symlink_to(folder / "stored" / "file")
    assert Checkpoint.open(folder, verify=True).scheme.wac == "a8w8c8"


def test_a_folder_behind_links_is_read(tiny_llama, tmp_path):
    """`/data -> /mnt/data`, and the shards of it in a folder that is a link as well."""
    (tmp_path / "mnt").mkdir()
    (tmp_path / "data").symlink_to(tmp_path / "mnt")
    out = write_quantized(tiny_llama, tmp_path / "data" / "out", shard_bytes=100_000)
    assert Checkpoint.open(out, verify=True).scheme.wac == "a8w8c8"
    assert Checkpoint.open(tmp_path / "mnt" / "out", verify=True).scheme.wac == "a8w8c8"


def test_what_is_copied_from_links_is_files(snapshot, tmp_path):
    source, made = Checkpoint.open(snapshot), tmp_path / "out"
    options = {"config": source.config, "aux_files": source.auxiliary_files}
    with CheckpointWriter(made, scheme=Scheme(), **options) as writer:
        writer.add("model.norm.weight", source.tensor("model.norm.weight"))
        writer.finish(ScaleTable(entries=()))
    copies = [made / path.name for path in source.auxiliary_files]
    assert copies
    assert not any(path.is_symlink() for path in copies)
    assert (made / "tokenizer.json").read_bytes() == (snapshot / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "quant/manifest.json"])
@pytest.mark.parametrize("kind", ["folder", "pipe", "circle", "nothing"])
def test_what_is_no_file_is_refused_by_name(make_quantized, tiny_llama, tmp_path, name, kind):
    folder = tmp_path / "checkpoint"
    shutil.copytree(make_quantized(tiny_llama), folder)
    file = folder / name
    file.unlink()
    if kind == "folder":
        file.mkdir()
    elif kind == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to(file.name if kind == "circle" else "gone")
    refused(f"'{name}'.*Copy or download the model again", Checkpoint.open, folder)


@pytest.mark.parametrize("name", ["\ud800", "a\0b", "x" * 300])
def test_a_name_that_no_file_can_have(tmp_path, name):
    refused("cannot be opened", find_file, tmp_path, name, "model.safetensors.index.json")


def test_a_file_that_this_user_may_not_read(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(os, "access", lambda *_: False)  # the tests may run as root
    refused("may not be read by this user.*chmod", find_file, tmp_path, "config.json")
