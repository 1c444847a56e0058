"""Models by their names on the hub: what is downloaded, from where it is read again, what is said."""

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from formats import hub
from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError
from tests.hub import COMMITS, point_at, serve_hub
from tests.refusals import refused_checkpoint as refused

TINY = hub.ROOT / "recipes" / "tiny-python"


@pytest.fixture(scope="module")
def served():
    with serve_hub() as server:
        server.add("org/tiny", TINY, **{"modeling_tiny.py": b"raise SystemExit"})
        server.models["org/tiny"]["onnx/model.safetensors"] = b"other"
        server.models["org/tiny"]["consolidated.safetensors"] = b"twice"
        server.models["org/tiny"]["pytorch_model.bin"] = b"pickle"
        server.models["org/tiny"]["LICENSE"] = b"Apache-2.0"
        server.models["org/tiny"]["quant/manifest.notes.json"] = b"{}"
        server.add("org/gated", TINY)
        server.gated.add("org/gated")
        server.models["org/gguf"] = {"model.Q4_0.gguf": b"GGUF", "README.md": b""}
        server.add("org/code", TINY)
        server.config["org/code"] = {"auto_map": {"AutoModel": "modeling.Model"}}
        yield server


@pytest.fixture
def online(served, tmp_path, monkeypatch):
    """A cache that is empty, and the server for a hub."""
    monkeypatch.chdir(tmp_path)
    point_at(served, tmp_path / "cache", monkeypatch)
    yield served
    hub._download.cache_clear()


def test_a_model_comes_by_its_name_without_code(online):
    folder = hub.model_folder("org/tiny")
    assert folder.name == COMMITS["main"]
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    expected = {p.name for p in TINY.iterdir()} - {"README.md"}
    assert names == expected | {"LICENSE", "quant/manifest.notes.json"}
    assert (folder / "config.json").read_bytes() == (TINY / "config.json").read_bytes()
    asked = len(online.asked)
    assert hub.model_folder(Path("org/tiny")) == folder
    assert len(online.asked) == asked  # once in a process


def test_a_revision_is_another_snapshot_and_a_commit_is_asked_for_once(online):
    folder = hub.model_folder("org/tiny", "v1")
    assert folder.name == COMMITS["v1"]
    online.asked.clear()
    assert hub.model_folder("org/tiny", COMMITS["v1"]) == folder
    assert online.asked == []
    assert hub.model_folder("org/tiny", COMMITS["main"]).name == COMMITS["main"]


@pytest.mark.parametrize(
    "given", ["./org/tiny", "../org/tiny", "/org/tiny", "~/org/tiny", "a/b/c", "org/tiny/"]
)
def test_what_is_spelled_as_a_path_is_none_of_the_hubs_models(given, online):
    with pytest.raises(CheckpointError, match="org/tiny: no such folder|a/b/c: no such folder"):
        hub.model_folder(hub.model_argument(given))
    assert online.asked == []
    assert hub.model_argument("org/tiny") == Path("org/tiny")
    Path("org/tiny").mkdir(parents=True)
    assert hub.model_argument("./org/tiny") == Path("org/tiny")


def test_a_folder_wins_over_the_hub(online, tmp_path):
    (tmp_path / "org" / "tiny").mkdir(parents=True)
    assert hub.model_folder("org/tiny") == Path("org/tiny")
    assert online.asked == []
    assert hub.model_folder("org/tiny", "v1").name == COMMITS["v1"]
    with pytest.raises(CheckpointError, match="local folder, which has no revision 'v1'"):
        hub.model_folder(tmp_path / "org" / "tiny", "v1")
    assert hub.model_folder("tiny-python") == TINY


@pytest.mark.parametrize("name", ["tiny", "a/b/c", "./org/tiny", "/org/tiny", "org/ti ny"])
def test_what_is_no_name_of_the_hub_is_not_asked_for(online, name):
    refused("no such folder", hub.model_folder, name)
    assert online.asked == []


@pytest.mark.parametrize(
    ("name", "revision", "reason"),
    [
        ("org/missing", None, "has none of that name that you may see"),
        ("org/gated", None, "it is gated; ask for access on its page"),
        ("org/tiny", "v2", "has no such revision of it"),
    ],
)
def test_a_refusal_of_the_hub_comes_with_the_remedy(online, name, revision, reason):
    with pytest.raises(CheckpointError, match=reason) as caught:
        hub.model_folder(name, revision)
    at = f" --revision {revision}" if revision else ""
    remedy = f"\n  hf download {name}{at} --local-dir {name.split('/')[1]}\n"
    assert remedy in str(caught.value)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("org/gguf", "no safetensors, only model.Q4_0.gguf"), ("org/code", "code of its own")],
)
def test_what_could_not_be_read_is_refused_before_it_is_downloaded(online, name, reason):
    refused(reason, hub.model_folder, name)
    assert len(online.asked) == 1


def unreachable() -> str:
    """An address that refuses connections."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


@pytest.mark.parametrize("fault", ["refused", "down", "offline"])
def test_without_a_network_the_cache_serves_and_else_the_error_is_quick(
    online, fault, monkeypatch, caplog
):
    folder = hub.model_folder("org/tiny")
    hub._download.cache_clear()  # as in a new process
    if fault == "refused":
        monkeypatch.setattr(constants, "ENDPOINT", unreachable())
    elif fault == "down":
        monkeypatch.setattr(online, "down", True)
    else:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        huggingface_hub.close_session()  # the client that a process starts with knows it is offline
    start = time.monotonic()
    assert hub.model_folder("org/tiny") == folder
    assert hub.model_folder("org/tiny", COMMITS["main"]) == folder
    assert ("going on with the copy in the cache" in caplog.text) == (fault != "offline")
    for revision in (None, "v1", COMMITS["v1"]):
        with pytest.raises(CheckpointError, match=r"\n  hf download org/other ") as caught:
            hub.model_folder("org/other", revision)
    said = {"refused": "cannot be reached", "down": "503", "offline": "HF_HUB_OFFLINE is set"}
    assert said[fault] in str(caught.value)
    assert time.monotonic() - start < 5
    monkeypatch.undo()
    huggingface_hub.close_session()


@pytest.mark.parametrize("fault", ["interrupted", "other"])
def test_a_snapshot_without_its_weights_is_completed_or_told(online, fault, monkeypatch, tmp_path):
    folder = hub.model_folder("org/tiny")
    (folder / "model.safetensors").unlink()
    if fault == "other":  # what a library leaves that wanted the tokenizer alone
        shutil.rmtree(folder.parents[1] / "trees", ignore_errors=True)
    hub._download.cache_clear()  # as in a new process
    with monkeypatch.context() as cut:
        cut.setattr(constants, "ENDPOINT", unreachable())
        for revision in (None, COMMITS["main"]):
            refused("hf download org/tiny", hub.model_folder, "org/tiny", revision)
    assert (hub.model_folder("org/tiny", COMMITS["main"]) / "model.safetensors").is_file()


def test_a_checkpoint_opens_by_its_name(online):
    checkpoint = Checkpoint.open("org/tiny", revision="v1")
    assert checkpoint.path.name == COMMITS["v1"]
    assert checkpoint.tensor("model.norm.weight").shape == (256,)


def test_a_name_like_that_of_a_folder_is_told(online, tmp_path):
    (tmp_path / "output" / "mine").mkdir(parents=True)
    for name in ("output/mime", "./output/mime"):
        refused(r"did you mean 'output/mine'\?", hub.model_folder, name)


@pytest.mark.parametrize("hidden", [False, True])
def test_downloads_show_bars_unless_they_are_hidden(served, tmp_path, monkeypatch, hidden):
    monkeypatch.delenv("HF_HUB_DISABLE_PROGRESS_BARS", raising=False)  # of a quiet run before
    code = "from formats.hub import hide_progress, model_folder\n"
    code += ("hide_progress()\n" if hidden else "") + "print(model_folder('org/tiny').name)"
    own = {"HF_ENDPOINT": served.url, "HF_HOME": str(tmp_path), "PYTHONPATH": str(hub.ROOT)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | own, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == COMMITS["main"]
    assert ("Fetching" in done.stderr) is not hidden
