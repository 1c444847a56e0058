"""What a run will take, before it starts: time by operations, memory and disk by what is held."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from formats.checkpoint.read import Checkpoint
from formats.errors import RecipeError
from ptq.plan.cost import predict_seconds
from ptq.plan.describe import describe_prediction
from ptq.plan.plan import Plan, Prediction, build_plan, preflight
from ptq.plan.preflight import meta_model
from ptq.plan.speed import Work, measure_speed
from ptq.recipe.schema import read_recipe
from ptq.text import duration_text

ROOT = Path(__file__).resolve().parents[3]
RECIPE = """\
model: {{path: {model}}}
dataset:
  calibration: {{samples: {samples}, sequence_length: {length}}}
  evaluation: {{samples: 2, sequence_length: 32}}
scheme: {scheme}
methods: [{methods}]
statistics: {{hessians: {hessians}}}
device: {device}
output: {{path: {output}}}
report: {{speed: false}}
"""
LAYERS = 2 * 128 * 128 + 2 * 64 * 128 + 3 * 128 * 256  # elements of a block of the tiny Llama


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
    path = folder / "r.yaml"
    path.write_text(
        RECIPE.format(
            model=model,
            output=folder / "out",
            scheme=scheme,
            methods=methods,
            samples=samples,
            length=length,
            device=device,
            hessians=str(hessians).lower(),
        )
    )
    loaded = read_recipe(path)
    return build_plan(loaded.recipe, Checkpoint.open(model), loaded.where)


def predict(folder: Path, model: Path, *args, **kwargs) -> Prediction:
    return plan(folder, model, *args, **kwargs).prediction


def run_products(tokens: int, layers: int = LAYERS) -> int:
    """Of one sample through a block with 128 elements in its query heads."""
    return tokens * 2 * layers + 4 * tokens * tokens * 128


def test_products_are_those_counted_by_hand(tiny_llama, tmp_path):
    work = predict(tmp_path, tiny_llama).work
    blocks, samples = 2, 2
    assert work["observe"].products == blocks * samples * run_products(32)
    both = 2 * 32 * 2 * LAYERS  # float and quantized outputs of each layer
    assert work["measure"].products == blocks * 2 * samples * (run_products(32) + both)
    assert work["rtn"].products == 0
    assert work["rtn"].elements == blocks * 12 * LAYERS


def test_without_a_need_for_data_only_the_compared_samples_run(tiny_llama, tmp_path):
    few, many = (predict(tmp_path, tiny_llama, samples=n) for n in (4, 64))
    assert few.work == many.work
    assert few.memory_bytes == many.memory_bytes
    static = predict(tmp_path, tiny_llama, "a8w8c8", samples=64)
    assert static.work["observe"].products == 16 * many.work["observe"].products


def test_what_a_stopped_run_goes_on_with_is_written_too(tiny_llama, tmp_path):
    rounded, static = (predict(tmp_path, tiny_llama, scheme) for scheme in ("w8", "a8w8"))
    assert rounded.work["write"].nbytes == 5 * rounded.checkpoint_bytes
    states = 2 * 32 * 128 * 4
    assert static.work["write"].nbytes == 6 * static.checkpoint_bytes + states


def test_gptq_counts_moments_factors_and_columns(tiny_llama, tmp_path):
    work = predict(tmp_path, tiny_llama, "w4", "gptq: {scale: absmax}", samples=3).work
    squares = 3 * 128**2 + 256**2  # attention's input and o's, the feed-forward's and down's
    squares -= 128**2  # the quarter of down's that follows from the one across the diagonal
    assert work["observe"].products == 2 * 3 * (run_products(32) + 2 * 32 * squares)
    rows = {128: 128 + 2 * 64 + 128 + 2 * 256, 256: 128}  # by inputs
    columns = sum(n * k * k for k, n in rows.items())
    assert work["gptq"].products == 2 * columns
    cubes = 4 / 3 * (3 * 128**3 + 256**3)
    assert work["gptq"].products64 == pytest.approx(2 * (cubes + 4 * columns))
    assert work["measure"].products == 2 * 2 * 2 * columns  # no sample runs: moments tell it
    assert work["measure"].products64 == 2 * 2 * 2 * columns


def test_a_search_runs_the_block_for_every_candidate_of_every_group(tiny_llama, tmp_path):
    def products(methods: str, phase: str, scheme: str) -> float:
        return predict(tmp_path, tiny_llama, scheme, methods, samples=8).work[phase].products

    run = 2 * run_products(32)  # of both blocks
    awq = products("{awq: {steps: 10, search_samples: 3}}, rtn", "awq", "w4")
    assert awq == 3 * run * (1 + 4 * 11)
    fixed = products("{smoothquant: {alpha: 0.5, search_samples: 2}}, rtn", "smoothquant", "a8w8")
    assert fixed == 2 * run * (1 + 4 * 2)
    pieces = "{smoothquant: {alphas: [0.5, 0.9], pieces: 4, search_samples: 2}}, rtn"
    assert products(pieces, "smoothquant", "a8w8") == 2 * run * (1 + 4 * (3 + 8))
    clip = "{clip: {factors: [0.9], search_samples: 2}}, rtn"
    assert products(clip, "clip", "a8w8") == 2 * run * (1 + 4 * 2)  # four distinct inputs
    smooth_k = "{smooth_k: {alphas: [0.5, 1.0], search_samples: 2}}"
    assert products(smooth_k, "smooth_k", "c8") == 2 * run * (1 + 3)


def test_refinement_counts_its_steps_and_a_second_set_of_states(tiny_llama, tmp_path):
    def predicted(methods: str) -> Prediction:
        return predict(tmp_path, tiny_llama, "w4", methods, samples=16, length=64)

    plain = predicted("gptq")
    refined = predicted("gptq, {refine: {iterations: 7, batch: 5}}")
    runs = 3 * 16 + 7 * 5 * 3  # targets and two errors; forward and backward
    assert refined.work["refine"].products == 2 * runs * run_products(64)
    assert refined.work["forward"].products == 2 * 16 * run_products(64)
    states = 16 * 64 * 128 * 4
    assert refined.disk_bytes - plain.disk_bytes == 2 * states
    assert refined.memory_bytes - plain.memory_bytes >= 2 * states


def test_folding_makes_the_samples_run_again_where_maxima_do_not_tell(tiny_llama, tmp_path):
    counted = [
        predict(tmp_path, tiny_llama, "a8w8", methods).work["observe"].counted
        for methods in ("rtn", "smoothquant, rtn", "smoothquant, clip, rtn")
    ]
    assert counted[0] == counted[1]
    assert counted[2] == 2 * counted[0]


def test_all_experts_are_observed_and_only_the_chosen_ones_searched(make_model, tmp_path):
    model = make_model("mixtral", num_local_experts=4, num_experts_per_tok=1)
    work = predict(tmp_path, model, "w4", "{awq: {steps: 1, search_samples: 1}}, rtn").work
    attention, expert = 2 * 128 * 128 + 2 * 64 * 128, 3 * 128 * 256
    observed = run_products(32, attention + 4 * expert)
    routed = run_products(32, attention + expert)
    assert work["observe"].products == 2 * 2 * observed
    assert work["awq"].products == 2 * routed * (1 + 4 * 2)  # experts' up -> down search as one


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
        even = Work(**dict.fromkeys(Work.model_fields, 1e9))
        return predict_seconds(p.work, even)["total"], p.memory_bytes, p.disk_bytes, p.device_bytes

    base, more, longer = predicted(8, 64), predicted(512, 64), predicted(8, 512)
    assert all(a < b for a, b in zip(base[:3], more[:3], strict=True))
    assert all(a < b for a, b in zip(base[:3], longer[:3], strict=True))
    assert base[3] <= more[3] <= more[3] * longer[3]
    assert (base[3] < longer[3]) == (device == "cuda")


def test_seconds_are_operations_by_speed():
    work = {"observe": Work(products=6e9, calls=10), "write": Work(nbytes=4)}
    speed = Work(products=2e9, products64=1, elements=1, counted=1, calls=5, nbytes=8)
    assert predict_seconds(work, speed) == {"observe": 5.0, "write": 0.5, "total": 5.5}


def test_speeds_are_measured():
    speed = measure_speed(torch.device("cpu"))
    assert all(value > 0 for _, value in speed)
    assert speed.products > 10 * speed.counted  # a product does far more than a histogram


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
    with pytest.raises(RecipeError, match=figure):
        predict(tmp_path, tiny_llama, "a8w8", samples=64, length=512)
    free.free += 1
    predict(tmp_path, tiny_llama, "a8w8", samples=64, length=512)


@pytest.fixture(scope="module")
def llama_8b(make_model, tmp_path_factory):
    """Folders of Llama-3-8B's shape with so many blocks: headers, and holes for weights."""

    def make(layers: int, vocabulary: int = 128256) -> Path:
        folder = tmp_path_factory.mktemp(f"llama{layers}")
        tiny = make_model("llama")
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(tiny / name, folder / name)
        config = json.loads((tiny / "config.json").read_text()) | {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": layers,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": vocabulary,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": False,
        }
        (folder / "config.json").write_text(json.dumps(config))
        write_header(folder)
        return folder

    return make


def write_header(folder: Path) -> None:
    """The file of a model's weights without its bytes: a hole as long as they are."""
    config = preflight.AutoConfig.from_pretrained(folder)
    header, end = {}, 0
    for name, tensor in meta_model(config).state_dict().items():
        start, end = end, end + 2 * tensor.numel()
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


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
    assert six.work["gptq"].products64 * 10 == pytest.approx(ten.work["gptq"].products64 * 6)


def test_check_tells_time_memory_and_disk(tiny_llama, tmp_path):
    lines = list(describe_prediction(plan(tmp_path, tiny_llama, "a8w8")))
    assert "on the disk about" in lines[0]
    assert "of it the process itself" in lines[1]
    assert "GPU" not in lines[1]
    assert lines[2].startswith("  quantization about ")
    assert "observe " in lines[2]
    lines = list(describe_prediction(plan(tmp_path, tiny_llama, "a8w8", device="cuda")))
    assert "GPU memory about" in lines[1]
    if not torch.cuda.is_available():
        assert "time unknown" in lines[2]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.04, "0.0 s"), (99, "99 s"), (600, "10 min"), (9000, "2.5 h")]
)
def test_durations(seconds, text):
    assert duration_text(seconds) == text


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
from ptq.recipe.schema import read_recipe

loaded = read_recipe(Path(sys.argv[1]))
plan = build_plan(loaded.recipe, Checkpoint.open(loaded.recipe.model.path))
before = rss_bytes()
result = quantize_tokens(plan, random_tokens(8, 128), progress=False)
print(plan.prediction.memory_bytes, result.peak_rss_bytes - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="reads peak memory from /proc")
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
