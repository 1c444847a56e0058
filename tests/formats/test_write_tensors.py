"""Weight files are written with the bytes of the library, and the mode of any new file."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import save_file

from formats.errors import CheckpointError
from formats.files import sha256_file
from formats.stored import shards
from formats.stored.safetensors_files import DTYPES, SafetensorsFile, write_tensors


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}, {"order": '["ä", "b\\n"]'}])
def test_the_bytes_are_those_of_the_library(tmp_path, metadata):
    tensors = {
        f"{name}{i}.{dtype}": torch.arange(n).to(dtype).reshape(shape)
        for i, dtype in enumerate(DTYPES.values())
        for name, n, shape in (("z", 6, (2, 3)), ("é", 0, (0, 4)), ("a", 1, ()))
    }
    tensors = dict(sorted(tensors.items(), key=lambda item: hash(item[0])))  # any order
    save_file(tensors, tmp_path / "theirs", metadata=metadata)
    write_tensors(tmp_path / "ours", tensors, metadata)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    (tmp_path / "new").touch()
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "new").stat().st_mode
    file = SafetensorsFile(tmp_path / "ours")
    read = {name: file.tensor(name) for name in tensors}
    assert all(torch.equal(read[n].float(), t.float()) for n, t in tensors.items())


def test_what_lies_otherwise_is_written_in_order_and_no_file_is_overwritten(tmp_path):
    turned = torch.arange(6).reshape(2, 3).T
    write_tensors(tmp_path / "file", {"turned": turned})
    assert torch.equal(SafetensorsFile(tmp_path / "file").tensor("turned"), turned)
    with pytest.raises(FileExistsError):
        write_tensors(tmp_path / "file", {"turned": turned})


def test_a_disk_that_gives_back_other_bits_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "sha256_file", lambda path: "0" * 64)
    with ThreadPoolExecutor(2) as pool:
        writer = shards.ShardWriter(tmp_path, 16, pool)
        for name in "abc":
            writer.add(name, torch.ones(4))
        with pytest.raises(CheckpointError, match="read back with other bits; check the disk"):
            writer.finish()


@pytest.mark.parametrize("names", ["a", "abc"])
def test_the_digests_are_those_of_the_files(tmp_path, names):
    for pool in (None, ThreadPoolExecutor(2)):
        folder = tmp_path / str(pool is None)
        folder.mkdir()
        writer = shards.ShardWriter(folder, 16, pool)
        for name in names:
            writer.add(name, torch.ones(4))
        digests = writer.finish()
        assert digests == {path.name: sha256_file(path) for path in folder.glob("*.safetensors")}
        assert len(digests) == len(names)
