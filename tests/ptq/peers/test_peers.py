"""Peers: a stand-in through the real worker, all the ways to fail, recipes, checks, the command."""

import importlib.util
import json
import sys
import time
import tomllib
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import save
from transformers import AutoModelForCausalLM

from calibrate.data import TokenSet, load_tokens
from formats.checkpoint.read import Checkpoint
from formats.errors import RecipeError
from inference.accuracy import Accuracy, compare
from inference.bench.peers.process import installed
from inference.engine import Engine
from ptq.commands import compare as runs
from ptq.commands import peers as command
from ptq.peers.measure import PeerRow, PeersRecord, measure_peers, peer_process, without_folders
from ptq.plan.plan import build_plan
from ptq.recipe.peers import JOB_NEEDS, QUANTIZERS, PeerChoice, Quantizer
from ptq.recipe.reading import load_recipe, read_recipe, resolved_yaml

ROOT = Path(__file__).resolve().parents[3]
RECIPE = """\
model: {{path: {model}}}
dataset:
  name: text.jsonl
  pack: false
  calibration: {{samples: 3, sequence_length: 24}}
  evaluation: {{samples: 4, sequence_length: 32}}
scheme: w4
methods: [rtn]
output: {{path: {output}}}
report: {{peers: {peers}}}
"""
ROUND = """\
import json, os, sys, torch

def quantize(job):
    model = job.load()
    with job.timed(), torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("_proj.weight"):
                scale = parameter.abs().amax(1, keepdim=True) / job.options["steps"]
                parameter.copy_((parameter / scale).round() * scale)
    json.dump(
        {
            "calibration": [ids.tolist() for ids in job.calibration],
            "ours": sorted({"ptq", "calibrate", "formats", "inference"} & set(sys.modules)),
            "python": [name for name in os.environ if name.startswith("PYTHON")],
            "threads": torch.get_num_threads(),
        },
        open(job.options["told"], "w"),
    )
    return model
"""
SENDS = """\
import os, sys

frame = sys._getframe()  # before anything heavy is imported
while "send" not in frame.f_locals:
    frame = frame.f_back
with open({frames!r}, "rb") as file:
    frame.f_locals["out"].write(file.read())
frame.f_locals["out"].flush()
os._exit(0)
"""


def recipe_file(folder: Path, model: Path, peers: object = "[fake]") -> Path:
    documents = ("x = y + " + "z * " * i for i in range(12))
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": d}) + "\n" for d in documents))
    path = folder / "r.yaml"
    path.write_text(RECIPE.format(model=model, output=folder / "out", peers=peers))
    return path


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Puts a stand-in into the catalogue: an adapter's text, which runs under this interpreter."""

    def make(text: str, *, package: str = "torch", in_extra: bool = False, **options: object):
        path = tmp_path / "adapter.py"
        path.write_text(text)
        peer = Quantizer(package, JOB_NEEDS, path, "rounding", options, in_extra)
        monkeypatch.setitem(QUANTIZERS, "fake", peer)
        return peer

    return make


@pytest.fixture(scope="module")
def tokens() -> dict[str, TokenSet]:
    """Two sequences of 9 and 6 tokens, the shorter one padded."""
    ids = torch.arange(18).reshape(2, 9)
    mask = torch.arange(9) < torch.tensor([[9], [6]])
    return {
        s: TokenSet(ids.clone(), mask.clone(), "made up", s) for s in ("calibration", "evaluation")
    }  # pyright: ignore[reportArgumentType]


@pytest.fixture(scope="module")
def original(tiny_llama) -> Engine:
    return Engine.from_pretrained(tiny_llama)


def measured(folder: Path, model: Path, original, tokens, peers: object = "[fake]") -> PeerRow:
    """The row of the only peer of a recipe."""
    recipe = load_recipe(recipe_file(folder, model, peers))
    (row,) = measure_peers(
        recipe, original, tokens["calibration"], tokens["evaluation"], progress=False
    )
    return row


def logits_frames(*logits: torch.Tensor) -> bytes:
    """What a worker sends: its record, then logits."""
    record = json.dumps({"seconds": 1.0, "peak_rss_bytes": 7}).encode()
    frames = [record, *(save({"logits": x.contiguous()}) for x in logits)]
    return b"".join(len(frame).to_bytes(8, "little") + frame for frame in frames)


class Transformers:
    """A scorer of the same weights without any process between."""

    def __init__(self, path: Path, steps: float) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for name, parameter in self.model.named_parameters():
            if name.endswith("_proj.weight"):
                scale = parameter.data.abs().amax(1, keepdim=True) / steps
                parameter.data = (parameter.data / scale).round() * scale

    def score(self, ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return self.model(input_ids=ids[None]).logits[0]


def test_the_command_measures_by_our_own_definitions(
    fake, tmp_path, tiny_llama, original, monkeypatch, capsys
):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    fake(ROUND, steps=7, told=str(tmp_path / "told.json"))
    recipe = load_recipe(path := recipe_file(tmp_path, tiny_llama))
    assert command.main([str(path)]) == 0
    record = PeersRecord.model_validate_json((tmp_path / "out" / "peers.json").read_bytes())
    (row,) = record.peers
    evaluation = load_tokens(recipe.dataset, original.tokenizer, "evaluation")
    own = compare(original, Transformers(tiny_llama, 7), evaluation.sequences())
    found = row.accuracy
    assert found is not None
    assert own.kl_mean > 0.001
    for name in ("kl_mean", "perplexity_ratio", "top1_agreement", "kl_p99"):
        assert getattr(found, name) == pytest.approx(getattr(own, name), rel=1e-5), name
    assert found.kl_mean_ci == pytest.approx(own.kl_mean_ci, rel=1e-5)
    assert found.tokens == own.tokens
    assert len({len(ids) for ids in evaluation.sequences()}) > 1  # some are padded
    assert record.evaluation.fingerprint == evaluation.fingerprint
    told = json.loads((tmp_path / "told.json").read_text())
    calibration = load_tokens(recipe.dataset, original.tokenizer, "calibration")
    assert told.pop("calibration") == [ids.tolist() for ids in calibration.sequences()]
    assert told == {"ours": [], "python": [], "threads": torch.get_num_threads()}
    assert row.threads == torch.get_num_threads()
    assert row.version == version("torch")
    assert row.seconds is not None
    assert 0 < row.seconds < 60
    assert row.peak_rss_bytes is not None
    assert 1e7 < row.peak_rss_bytes < 1e11
    printed = capsys.readouterr().out
    assert f"{found.kl_mean:.3g}" in printed
    assert "could not run" not in printed


def test_what_the_worker_tells_is_in_the_row(fake, tmp_path, tiny_llama, original, tokens):
    sequences = tokens["evaluation"].sequences()
    changed = [original.score(ids) * 1.1 for ids in sequences]
    assert [len(x) for x in changed] == [9, 6]
    (tmp_path / "frames").write_bytes(logits_frames(*changed))
    fake(SENDS.format(frames=str(tmp_path / "frames")))
    row = measured(tmp_path, tiny_llama, original, tokens)
    assert (row.error, row.seconds, row.peak_rss_bytes) == (None, 1.0, 7)
    assert row.accuracy is not None
    assert row.accuracy.tokens == 8 + 5


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("raise ValueError('no\\n /a/b/c.txt')", "ValueError: no c.txt"),
        ("import os\nprint('last words', flush=True)\nos._exit(3)", "its process ended with exit code 3; the last that it printed: last words"),
        ("import os\nos.kill(os.getpid(), 9)", "its process ended with exit code -9 (killed: memory may have run out); the last that it printed: nothing"),
        ("import no_such_package", "ModuleNotFoundError: No module named 'no_such_package'"),
    ],
)  # fmt: skip
def test_a_peer_that_fails_is_a_row_with_its_reason(
    fake, tmp_path, tiny_llama, original, tokens, text, reason
):
    fake(text)
    row = measured(tmp_path, tiny_llama, original, tokens)
    assert row.error == reason
    assert (row.accuracy, row.seconds) == (None, None)
    assert row.version == version("torch")
    log = (tmp_path / "out" / "peers" / "fake.log").read_text()
    assert ("Traceback" in log) is ("Error" in reason)


@pytest.mark.parametrize("fault", ["nothing", "nan", "short", "missing", "cut", "vocabulary"])
def test_logits_that_cannot_be_judged_are_refused(
    fake, tmp_path, tiny_llama, original, tokens, fault
):
    first, second = (original.score(ids) for ids in tokens["evaluation"].sequences())
    made = {
        "nothing": ((first, second), "it quantized nothing"),
        "nan": ((first, second * torch.nan), "are not finite"),
        "short": ((first, second[1:]), "of 6 tokens are not finite, or too few"),
        "missing": ((first,), "its process ended with exit code 0"),
        "cut": ((first, second), "its process ended with exit code 0"),
        "vocabulary": ((first[:, 1:], second), "compare models with one vocabulary"),
    }
    logits, reason = made[fault]
    data = logits_frames(*logits)[: -100 if fault == "cut" else None]
    (tmp_path / "frames").write_bytes(data)
    fake(SENDS.format(frames=str(tmp_path / "frames")))
    row = measured(tmp_path, tiny_llama, original, tokens)
    assert reason in (row.error or "")
    assert row.accuracy is None


def test_a_peer_is_stopped_when_its_time_is_over(fake, tmp_path, tiny_llama, original, tokens):
    fake("import time\ntime.sleep(100)")
    start = time.monotonic()
    row = measured(tmp_path, tiny_llama, original, tokens, "[{name: fake, timeout: 0.5}]")
    assert row.error == "stopped after its 0.5 s; a larger `timeout` gives it longer"
    assert time.monotonic() - start < 30


def test_what_a_peer_has_started_ends_with_it(fake, tmp_path):
    started = tmp_path / "started"
    fake(
        "import os, subprocess, time\n"
        f"child = subprocess.Popen(['sleep', '100'])\nopen({str(started)!r}, 'w').write(f'{{child.pid}}\\n')\n"
        "time.sleep(100)"
    )
    job = {"adapter": str(QUANTIZERS["fake"].adapter), "folder": str(tmp_path)}
    with peer_process(PeerChoice(name="fake"), job, tmp_path / "log", cpu_only=True):
        for _ in range(600):
            if started.exists() and started.read_text().endswith("\n"):
                break
            time.sleep(0.05)
        child = Path(f"/proc/{started.read_text().strip()}/stat")
        assert child.exists()
    for _ in range(100):
        if not child.exists() or child.read_text().split()[2] == "Z":
            return
        time.sleep(0.05)
    pytest.fail("the child is still running")


@pytest.mark.parametrize("python", ["/bin/true", "/nowhere/python", "/etc/passwd"])
def test_an_interpreter_that_is_none_is_a_row_and_a_problem(
    fake, tmp_path, tiny_llama, original, tokens, python
):
    fake("")
    peers = f"[{{name: fake, python: {python}}}]"
    row = measured(tmp_path, tiny_llama, original, tokens, peers)
    assert "cannot be used as a Python interpreter" in (row.error or "")
    (line,) = problems(tmp_path, tiny_llama, peers)
    assert line.startswith(f"r.yaml:10: report.peers.0.python: {python} cannot be used as")
    assert line.endswith("; give the path of the interpreter of an environment that has torch")


def problems(folder: Path, model: Path, peers: str) -> list[str]:
    """What the pre-flight check says."""
    loaded = read_recipe(recipe_file(folder, model, peers))
    with pytest.raises(RecipeError) as caught:
        build_plan(loaded.recipe, Checkpoint.open(model), loaded.where)
    return str(caught.value).replace(f"{folder}/", "").splitlines()


def test_the_check_tells_how_to_install_what_is_missing(fake, tmp_path, tiny_llama):
    fake("", package="no-such-thing", in_extra=True)
    lacks = f"fake needs no-such-thing, which {sys.executable} does not have"
    (line,) = problems(tmp_path, tiny_llama, "[fake]")
    assert line == f"r.yaml:10: report.peers.0: {lacks}; install with `pip install 'ptq[peers]'`"
    fake("", package="no-such-thing")
    (line,) = problems(tmp_path, tiny_llama, "[fake]")
    assert f"{lacks}. It pins other versions than this project; make an environment" in line
    assert "pip install torch transformers safetensors no-such-thing`" in line
    (line,) = problems(tmp_path, tiny_llama, f"[{{name: fake, python: {sys.executable}}}]")
    assert line.endswith(f"`{sys.executable} -m pip install no-such-thing`")
    fake("")
    build_plan(recipe := load_recipe(tmp_path / "r.yaml"), Checkpoint.open(recipe.model.path))


def test_versions_are_those_of_the_interpreter_asked():
    assert installed(sys.executable, ["torch", "no-such-thing"]) == {
        "torch": version("torch"),
        "no-such-thing": None,
    }


def test_short_forms_and_paths_of_interpreters(fake, tmp_path, tiny_llama, monkeypatch):
    fake("")
    monkeypatch.chdir(tmp_path.parent)
    peers = "[autoround, {name: fake, python: env/bin/python, timeout: 5}]"
    path = recipe_file(tmp_path, tiny_llama, peers)
    first, second = load_recipe(path).report.peers
    assert first == PeerChoice(name="autoround")
    assert second == PeerChoice(name="fake", python=tmp_path / "env/bin/python", timeout=5)
    typed = load_recipe(path, ["report.peers=[{name: fake, python: ./python}]"])
    assert typed.report.peers[0].python == tmp_path.parent / "python"
    (tmp_path / "again.yaml").write_text(resolved_yaml(load_recipe(path)))
    assert load_recipe(tmp_path / "again.yaml") == load_recipe(path)


def test_peers_of_the_command_line_stand_in_for_those_of_the_recipe(fake, tmp_path, tiny_llama):
    fake("raise ValueError('asked')")
    path = recipe_file(tmp_path, tiny_llama, "[autoround]")
    output = tmp_path / "elsewhere"
    peer = f"fake={sys.executable}"
    assert command.main([str(path), "--peer", peer, "--output", str(output)]) == 1
    record = PeersRecord.model_validate_json((output / "peers.json").read_bytes())
    assert [(row.name, row.error) for row in record.peers] == [("fake", "ValueError: asked")]
    build_plan(
        load_recipe(path, ["report.peers=[]", f"output.path={output}"]), Checkpoint.open(tiny_llama)
    )
    with pytest.raises(RecipeError, match="unknown peer 'fkae'; did you mean 'fake'?"):
        command.main([str(path), "--peer", "fkae"])
    with pytest.raises(RecipeError, match="found no peers in report.peers; name some there"):
        command.main([str(path), "--set", "report.peers=[]"])


def row_of(name: str, kl: float, accuracy: Accuracy) -> PeerRow:
    judged = accuracy.model_copy(update={"kl_mean": kl})
    return PeerRow(
        name=name, method="m", package="p", version="1", threads=1, seconds=2.0, accuracy=judged
    )


def test_compare_puts_peers_beside_each_other(fake, tmp_path, tiny_llama, original, tokens, capsys):
    fake("raise ValueError('asked')")
    command.main([str(recipe_file(tmp_path, tiny_llama))])
    path = tmp_path / "out" / "peers.json"
    record = PeersRecord.model_validate_json(path.read_bytes())
    accuracy = compare(original, Transformers(tiny_llama, 7), tokens["evaluation"].sequences())
    rows = [row_of("b", 0.5, accuracy), *record.peers, row_of("a", 0.25, accuracy)]
    path.write_text(record.model_copy(update={"peers": tuple(rows)}).model_dump_json())
    capsys.readouterr()
    assert runs.main([str(tmp_path / "out"), "--plot", str(tmp_path / "p.svg")]) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [line.split(" | ")[0] for line in lines] == ["| `a`", "| `b`"]
    assert lines[0].split(" | ")[1:5] == ["p 1", "m", "", ""]
    assert "p 1" in (tmp_path / "p.svg").read_text()


def test_paths_are_cut_from_reasons():
    assert without_folders("no /a/b/c.txt in '/a/d e'") == "no c.txt in 'd e'"
    assert without_folders("1/2 or x/y, http://a/b") == "1/2 or x/y, http://a/b"


def test_the_catalogue_the_extra_and_the_shipped_recipe_agree():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = {text.split(">")[0].split("[")[0] for text in project["optional-dependencies"]["peers"]}
    held = [peer for peer in QUANTIZERS.values() if peer.in_extra]
    assert {peer.package for peer in held} == extra - {"accelerate"}
    assert all(peer.adapter.is_file() for peer in QUANTIZERS.values())
    shipped = load_recipe(ROOT / "recipes" / "peers" / "w4_gptq.yaml").report.peers
    assert {QUANTIZERS[spec.name].package for spec in shipped} == {peer.package for peer in held}


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", list(QUANTIZERS))
def test_the_real_package(name, tmp_path, tiny_llama, original):
    """Runs where the package is installed beside ours."""
    if None in installed(sys.executable, QUANTIZERS[name].distributions).values():
        pytest.skip(f"{QUANTIZERS[name].package} is not installed")
    recipe = load_recipe(recipe_file(tmp_path, tiny_llama, f"[{name}]"))
    tokens = {s: load_tokens(recipe.dataset, original.tokenizer, s) for s in ("calibration", "evaluation")}  # fmt: skip
    row = measured(tmp_path, tiny_llama, original, tokens, f"[{name}]")
    assert row.error is None, (tmp_path / "out" / "peers" / f"{name}.log").read_text()
    assert row.accuracy is not None
    assert 0 < row.accuracy.kl_mean < 2


def test_llm_compressor_is_asked_for_what_its_names_say(monkeypatch):
    """Its package is not here: its classes stand for what they are given."""

    class Module(ModuleType):
        def __getattr__(self, name: str):
            if name.startswith("__"):
                raise AttributeError(name)
            return lambda **given: {"class": name} | given

    names = ["compressed_tensors.quantization", "llmcompressor.modifiers.gptq", "datasets"]
    names += [f"llmcompressor.modifiers.{name}" for name in ("quantization", "transform.awq")]
    names += ["llmcompressor.modifiers.transform.smoothquant", "llmcompressor.pipelines.cache"]
    for name in names:
        for end in range(1, name.count(".") + 2):
            part = ".".join(name.split(".")[:end])
            monkeypatch.setitem(sys.modules, part, Module(part))
    spec = importlib.util.spec_from_file_location(
        "adapter", QUANTIZERS["llm-compressor-gptq"].adapter
    )
    assert spec is not None
    assert spec.loader is not None
    adapter = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(adapter)

    def asked(name: str):
        *before, last = adapter.modifiers(**QUANTIZERS[f"llm-compressor-{name}"].options)
        return [one["class"] for one in before], last

    (before, last), args = asked("gptq-64"), {"class": "QuantizationArgs", "type": "int"}
    (layers,) = last["config_groups"].values()
    assert (before, last["class"], last["ignore"]) == ([], "GPTQModifier", ["lm_head"])
    args |= {"symmetric": True, "num_bits": 4, "strategy": "group", "group_size": 64}
    assert layers == {"class": "QuantizationScheme", "targets": ["Linear"], "weights": args}
    before, last = asked("a8w8")
    (layers,) = last["config_groups"].values()
    assert before == ["SmoothQuantModifier"]
    assert layers["weights"]["strategy"] == "channel"
    assert layers["input_activations"]["strategy"] == "tensor"
    assert asked("a8w8-dynamic")[1]["scheme"] == "W8A8"
