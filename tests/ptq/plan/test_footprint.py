"""What a run will hold, before it starts: memory and room on the disk."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from formats.checkpoint.read import Checkpoint
from ptq.plan.describe import describe_prediction
from ptq.plan.plan import Plan, Prediction, build_plan, preflight
from ptq.recipe.reading import read_recipe
from tests.ptq.quantizing import edit_config, write_header, write_recipe
from tests.refusals import refused_recipe

ROOT = Path(__file__).resolve().parents[3]


def plan(
    folder: Path,
    model: Path,
    scheme: str = "w8",
    methods: str = "rtn",
    *,
    samples: int = 2,
    length: int = 32,
    device: str = "cpu",
    hessians: bool = False,
) -> Plan:
    keys = {"scheme": scheme, "methods": yaml.safe_load(f"[{methods}]"), "device": device}
    keys |= {"statistics": {"hessians": hessians}, "output": {"path": str(folder / "out")}}
    loaded = read_recipe(write_recipe(folder, model, samples, length, **keys))
    return build_plan(loaded.recipe, Checkpoint.open(model), loaded.where, solves=False)


def predict(folder: Path, model: Path, *args, **kwargs) -> Prediction:
    return plan(folder, model, *args, **kwargs).prediction


def test_without_a_need_for_data_only_the_compared_samples_run(tiny_llama, tmp_path):
    few, many = (predict(tmp_path, tiny_llama, samples=n) for n in (4, 64))
    assert few.memory_bytes == many.memory_bytes
    static = predict(tmp_path, tiny_llama, "a8w8c8", samples=64)
    assert static.memory_bytes > many.memory_bytes


def test_refinement_keeps_a_second_set_of_states(tiny_llama, tmp_path):
    def predicted(methods: str) -> Prediction:
        return predict(tmp_path, tiny_llama, "w4", methods, samples=16, length=64)

    plain = predicted("gptq")
    refined = predicted("gptq, {refine: {iterations: 7, batch: 5}}")
    states = 16 * 64 * 128 * 4
    assert refined.disk_bytes - plain.disk_bytes == 2 * states
    assert refined.memory_bytes - plain.memory_bytes >= 2 * states


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("scheme", "methods"),
    [
        ("a8w8c8", "smoothquant, rtn"),
        ("a8w8c8", "smoothquant, smooth_k, clip, rtn"),
        ("w4", "awq, {rtn: {scale: output_mse}}"),
        ("w4", "gptq, refine"),
    ],
)
def test_more_and_longer_samples_take_more(tiny_llama, tmp_path, scheme, methods, device):
    def predicted(samples: int, length: int) -> tuple[float, ...]:
        p = predict(
            tmp_path, tiny_llama, scheme, methods, samples=samples, length=length, device=device
        )
        return p.memory_bytes, p.disk_bytes, p.device_bytes

    base, more, longer = predicted(8, 64), predicted(512, 64), predicted(8, 512)
    assert all(a < b for a, b in zip(base[:2], more[:2], strict=True))
    assert all(a < b for a, b in zip(base[:2], longer[:2], strict=True))
    assert base[2] <= more[2] <= more[2] * longer[2]
    assert (base[2] < longer[2]) == (device == "cuda")


def test_hessians_take_room_on_the_disk_where_they_are_kept(tiny_llama, tmp_path):
    without, kept = (
        predict(tmp_path, tiny_llama, "w4", "gptq", hessians=h).disk_bytes for h in (False, True)
    )
    assert kept - without == 2 * 4 * (3 * 128**2 + 256**2)


def test_a_disk_that_holds_the_checkpoint_but_not_what_a_run_goes_on_with(
    tiny_llama, tmp_path, monkeypatch
):
    predicted = predict(tmp_path, tiny_llama, "a8w8", samples=64, length=512)
    states = 2 * 64 * 512 * 128 * 4
    assert predicted.disk_bytes > 2 * predicted.checkpoint_bytes + states
    free = SimpleNamespace(free=predicted.disk_bytes - 1)
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _: free)
    figure = f"needs about {predicted.disk_bytes / 1e6:.0f} MB"
    refused_recipe(figure, predict, tmp_path, tiny_llama, "a8w8", samples=64, length=512)
    free.free += 1
    predict(tmp_path, tiny_llama, "a8w8", samples=64, length=512)


@pytest.fixture(scope="module")
def llama_8b(make_model, tmp_path_factory):
    """Folders of Llama-3-8B's shape with so many blocks: headers, and holes for weights."""

    def make(layers: int, vocabulary: int = 128256) -> Path:
        folder = tmp_path_factory.mktemp(f"llama{layers}")
        tiny = make_model("llama")
        for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
            shutil.copy(tiny / name, folder / name)
        sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": layers}
        sizes |= {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
        sizes |= {"vocab_size": vocabulary, "max_position_embeddings": 8192}
        write_header(edit_config(folder, **sizes, tie_word_embeddings=False))
        return folder

    return make


GIB = 1 << 30
PROCESS = 0.7  # GiB of the host figures below


@pytest.mark.parametrize(
    ("scheme", "methods", "device_gib", "host_gib"),
    [
        ("w4", "gptq", 9.5, 13.2),
        ("a8w8c8", "{smoothquant: {alpha: 0.9}}, rtn", 3.2, 15.9),
        ("fp8_block", "rtn", 3.2, 5.4),
    ],
)
def test_memory_at_a_large_size_is_near_what_was_measured(
    llama_8b, tmp_path, monkeypatch, scheme, methods, device_gib, host_gib
):
    """128 x 2048 tokens on one H200: recipes/RESULTS.md."""
    plenty = SimpleNamespace(free=1 << 50)
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _: plenty)
    model, size = llama_8b(32), {"samples": 128, "length": 2048, "device": "cuda"}
    predicted = predict(tmp_path, model, scheme, methods, **size)
    assert predicted.device_bytes / GIB == pytest.approx(device_gib, rel=0.3)
    assert predicted.memory_bytes / GIB + PROCESS == pytest.approx(host_gib, rel=0.3)


def test_memory_of_measuring_is_that_counted_by_hand(llama_8b, tmp_path, monkeypatch):
    """A block in fp32, its layers as integers and in fp32, and three fp64 copies of the widest."""
    plenty = SimpleNamespace(free=1 << 50)
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _: plenty)
    predicted = predict(tmp_path, llama_8b(2, vocabulary=384), "w8", "rtn", device="cuda")
    widest = 4096 * 14336
    layers = 2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * widest
    assert predicted.device_bytes == 4 * (layers + 2 * 4096) + 5 * layers + 24 * widest


def test_memory_does_not_grow_with_depth(llama_8b, tmp_path, monkeypatch):
    plenty = SimpleNamespace(free=1 << 50)
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _: plenty)
    six, ten = (predict(tmp_path, llama_8b(n), "w4", "gptq", samples=8) for n in (6, 10))
    assert six.memory_bytes == ten.memory_bytes
    assert six.checkpoint_bytes < ten.checkpoint_bytes


def test_check_tells_memory_and_disk(tiny_llama, tmp_path):
    lines = list(describe_prediction(plan(tmp_path, tiny_llama, "a8w8")))
    assert "on the disk about" in lines[0]
    assert "of it the process itself" in lines[1]
    assert "GPU" not in lines[1]
    lines = list(describe_prediction(plan(tmp_path, tiny_llama, "a8w8", device="cuda")))
    assert "GPU memory about" in lines[1]


MEASURED = """
import sys
from pathlib import Path

sys.path.insert(0, {root!r})
import ptq
import torch

torch.set_num_threads(1)
from tests.ptq.quantizing import random_tokens
from formats.checkpoint.read import Checkpoint
from formats.memory import rss_bytes
from ptq.pipeline.driver import quantize_tokens
from ptq.plan.plan import build_plan
from ptq.recipe.reading import read_recipe

loaded = read_recipe(Path(sys.argv[1]))
plan = build_plan(loaded.recipe, Checkpoint.open(loaded.recipe.model.path))
before = rss_bytes()
result = quantize_tokens(plan, random_tokens(8, 128), progress=False)
print(plan.prediction.memory_bytes, result.peak_rss_bytes - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="reads peak memory from /proc")
@pytest.mark.ci  # processes of their own, one after the other
def test_measured_memory_is_near_the_predicted(make_model, tmp_path):
    model = make_model(
        layers=1,
        hidden_size=768,
        intermediate_size=2048,
        num_attention_heads=12,
        num_key_value_heads=4,
        head_dim=64,
    )
    plan(tmp_path, model, "w4", "gptq: {scale: absmax}", samples=8, length=128)
    script = MEASURED.format(root=str(ROOT))
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "r.yaml")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    predicted, measured = map(int, done.stdout.split())
    assert 0.7 < predicted / measured < 1.3, (predicted, measured)


def test_what_a_stopped_run_has_kept_counts_as_room(tiny_llama, tmp_path, monkeypatch):
    needed = predict(tmp_path, tiny_llama, "a8w8").disk_bytes
    free = SimpleNamespace(free=needed - 1000)
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _: free)
    refused_recipe("MB free", predict, tmp_path, tiny_llama, "a8w8")
    kept = tmp_path / "out" / ".resume"
    kept.mkdir(parents=True)
    (kept / "block-00000.safetensors").write_bytes(bytes(1000))
    predict(tmp_path, tiny_llama, "a8w8")
