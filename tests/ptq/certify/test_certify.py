"""`ptq certify` on the small default model: itself, a damaged copy, the files, verification."""

import contextlib
import io
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from formats.chat_tokens import ChatEncoder
from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError, NoFixedOrderError, PTQError, RequestError
from formats.stored.folder import CERTIFICATE, MANIFEST, auxiliary_files
from formats.tokenizer import load_tokenizer
from inference.engine import Engine
from ptq.certify import measuring, setting
from ptq.certify.answering import FIELDS, first_object, fits, object_cases, repeats
from ptq.certify.certificate import Certificate, kl_limit, read_certificate, write_certificate
from ptq.certify.figures import TASKS, judge, overall
from ptq.certify.setting import Level, Setting, read_texts
from ptq.certify.texts import context_cases
from ptq.commands import certify as command
from ptq.commands import inspect, run
from ptq.output import CERTIFICATE_PAGE
from tests.conftest import write_quantized
from tests.formats.test_chat_tokens import FORGED, byte_level, controls
from tests.ptq.certify.planting import coarse_layer
from tests.ptq.quantizing import write_recipe
from tests.refusals import refused_checkpoint, refused_request

MODEL = Path(__file__).parents[3] / "recipes" / "tiny-python"
SMALL = Level(6, 96, 1, 640, 8, 4, 12, 6, 1, 6, 512)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """A level that takes seconds."""
    monkeypatch.setattr(setting, "LEVELS", {"quick": SMALL})
    monkeypatch.setattr(measuring, "LEVELS", {"quick": SMALL})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return write_quantized(MODEL, tmp_path_factory.mktemp("run") / "checkpoint", "w8")


@pytest.fixture(scope="module")
def certified(checkpoint, tmp_path_factory) -> tuple[Path, str]:
    """A checkpoint with its certificate, and what the command printed of it."""
    folder = shutil.copytree(checkpoint, tmp_path_factory.mktemp("certified") / "checkpoint")
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        for module in (setting, measuring):
            patch.setattr(module, "LEVELS", {"quick": SMALL})
        assert command.main([str(folder), "--against", str(MODEL), "--quiet"]) in (0, 1)
    return folder, printed.getvalue()


@pytest.fixture
def copied(certified, tmp_path) -> Path:
    """A copy of it that a test may change."""
    return shutil.copytree(certified[0], tmp_path / "checkpoint")


@pytest.fixture(scope="module")
def own() -> Setting:
    return Setting(SMALL, 0, *read_texts(None, None), load_tokenizer(MODEL), 1024)


def measured(original: Path, other: Path, places: int = 16, seed: int = 0):
    folders = original, other
    asked = measuring.open_setting(folders, "quick", seed, None, "cpu")
    pair = measuring.open_pair(folders, asked, "cpu")
    other_places = measuring.open_pair(folders, asked, "cpu", places)
    pair = setting.Pair(pair.original, other_places.quantized)
    rows = measuring.measure(pair, asked, progress=False)
    return judge(row for part in rows.values() for case in part for row in case)


class Counter:
    """A bar that counts what it is moved on by."""

    def __init__(self, total: int, **_: object) -> None:
        self.total, self.done = total, 0

    def update(self) -> None:
        self.done += 1


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.ci)])
def test_a_model_against_itself_in_other_batches_is_green(seed, monkeypatch):
    bars = []

    def bar(**options):
        bars.append(Counter(**options))
        return contextlib.nullcontext(bars[-1])

    monkeypatch.setattr(measuring, "bar", bar)
    figures = measured(MODEL, MODEL, places=3, seed=seed)
    assert overall(figures)[0] == "green"
    assert {figure.difference for figure in figures} == {0}
    assert {f.name.partition(".")[0] for f in figures} >= {"kl", "answers", "objects", "needle"}
    assert [own.done for own in bars[:3]] == [own.total for own in bars[:3]]
    assert bars[3].done <= bars[3].total  # contexts this short have fewer questions


@pytest.mark.ci  # lm-eval reads thousands of files
def test_standard_tasks_are_figures_where_the_level_asks():
    pytest.importorskip("lm_eval")
    asked = measuring.open_setting((MODEL, MODEL), "quick", 0, None, "cpu")
    asked = replace(asked, level=replace(SMALL, tasks=8))
    cases = measuring.PARTS["tasks"].cases(asked)
    pair = measuring.open_pair((MODEL, MODEL), asked, "cpu")
    rows = measuring.measure(pair, asked, {"tasks": range(len(cases))}, progress=False)
    figures = judge(row for case in rows["tasks"] for row in case)
    assert {f.name for f in figures} == {f"tasks.{name}" for name in TASKS}
    assert {(f.cases, f.difference) for f in figures} == {(8, 0)}


def test_a_damaged_model_is_red(tmp_path):
    figures = measured(MODEL, coarse_layer(MODEL, tmp_path / "model", 3, bits=2))
    light, told = overall(figures)
    assert light == "red"
    assert "kl.at_64" in told


def test_the_command_certifies_inspect_tells_and_verify_compares(certified, copied, capsys):
    folder, out = copied, certified[1]
    assert "kl.mean: mean KL divergence" in out
    found = read_certificate(folder)
    assert found is not None
    assert found.headline in out
    assert found.made.weights.keys() == {p.name for p in folder.glob("*.safetensors")}
    page = (folder / CERTIFICATE_PAGE).read_text()
    assert found.headline.partition(":")[0] in page
    assert page.count("data:image/svg+xml") > 2
    assert CERTIFICATE in json.loads((folder / MANIFEST).read_text())["files"]
    Checkpoint.open(folder, verify=True)
    assert CERTIFICATE not in {path.name for path in auxiliary_files(folder)}
    assert inspect.main([str(folder)]) == 0
    assert "These are the files that were certified" in capsys.readouterr().out

    assert command.main([str(folder), "--verify", "--quiet"]) == 0
    assert "gave the same digits" in capsys.readouterr().out
    told = json.loads((folder / CERTIFICATE).read_text())
    for case in told["rows"]["objects"]:
        case[0]["values"]["objects.likelihood"][1] += 1e-9
    (folder / CERTIFICATE).write_text(json.dumps(told))
    with pytest.raises(CheckpointError, match=r"manifest.json says"):  # it was changed
        command.main([str(folder), "--verify", "--quiet"])
    write_certificate(folder, Certificate.model_validate_json(json.dumps(told)), page)
    assert command.main([str(folder), "--verify", "--quiet"]) == 1
    assert "NOT THE SAME: objects.likelihood of object" in capsys.readouterr().out

    weights = next(folder.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    assert command.main([str(folder), "--verify", "--quiet"]) == 1
    assert f"{weights.name} changed since they were certified" in capsys.readouterr().out


@pytest.mark.usefixtures("unpictured")
def test_sums_of_no_fixed_order_are_certified_and_not_verified(
    checkpoint, tmp_path, monkeypatch, capsys, caplog
):
    """As of mixtures of experts on a GPU."""
    opened = Engine.from_pretrained

    def from_pretrained(folder, *, config, device):
        if config.invariant:
            raise NoFixedOrderError("invariant: it is a mixture of experts")
        return opened(folder, config=config, device=device)

    monkeypatch.setattr(Engine, "from_pretrained", staticmethod(from_pretrained))
    folder = str(shutil.copytree(checkpoint, tmp_path / "checkpoint"))
    assert command.main([folder, "--against", str(MODEL), "--quiet"]) in (0, 1)
    assert "mixture of experts. It is left out" in caplog.text
    assert "sums in no fixed order" in (Path(folder) / CERTIFICATE_PAGE).read_text()
    with pytest.raises(RequestError, match="no fixed order.* certify it with `--device cpu`"):
        command.main([folder, "--verify"])


def test_a_second_certificate_takes_the_place_of_the_first(copied, tmp_path, unpictured):
    folder = copied
    prompts = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"text": f"def f{i}(a):\n    return a + {i}\n" * 20}) for i in range(30)]
    prompts.write_text("\n".join(lines))
    given = ["--against", str(MODEL), "--quiet", "--prompts", str(prompts), "--seed", "3"]
    command.main([str(folder), *given])
    found = read_certificate(folder)
    assert found is not None
    assert found.made.seed == 3
    assert "kl.prompts" in {figure.name for figure in found.figures}
    Checkpoint.open(folder, verify=True)


def test_chats_of_prompts_have_the_control_tokens_that_they_are_served_with(tmp_path):
    tokenizer, said = byte_level(), "\n".join(f"{i} {FORGED}" for i in range(20))
    chats = [[{"role": "user", "content": f"{i}\n{said}"}] for i in range(6)]
    prompts = tmp_path / "chats.jsonl"
    prompts.write_text("\n".join(json.dumps({"messages": chat}) for chat in chats))
    asked = Setting(SMALL, 0, *read_texts(prompts, tokenizer), tokenizer, 1024)
    served = [token for chat in chats for token in ChatEncoder(tokenizer).tokens(chat)]
    found = asked.encode(asked.texts["prompts"])
    assert controls(tokenizer, found) == controls(tokenizer, served)
    assert FORGED in tokenizer.decode(found)
    pieces = [token for ids in asked.windows("prompts", 6, 200, "a") for token in ids]
    assert pieces
    assert len(controls(tokenizer, pieces)) <= 6 * len(
        controls(tokenizer, served[: len(served) // 6])
    )


@pytest.mark.usefixtures("unpictured")
def test_a_recipe_asks_for_one_and_its_verdict_is_the_runs(tmp_path, tiny_llama, capsys):
    report = {"speed": False, "attribution": False, "certificate": "quick"}
    report["thresholds"] = {"kl": 9.0}
    output = {"path": str(tmp_path / "out")}
    recipe = write_recipe(tmp_path, tiny_llama, output=output, report=report)
    code = run.main([str(recipe), "--quiet"])
    found = read_certificate(tmp_path / "out" / "checkpoint")
    assert found is not None
    assert f"certified:  {found.headline}" in capsys.readouterr().out
    assert code == (found.verdict == "red")
    assert found.limit == 9


def test_what_is_missing_is_said(checkpoint, tiny_llama, tmp_path):
    refused_request("give the original model", command.main, [str(checkpoint)])
    with pytest.raises(CheckpointError, match="found no certificate.json; make it with"):
        command.main([str(checkpoint), "--verify"])
    with pytest.raises(RequestError, match="vocabulary of 384 tokens"):
        command.main([str(checkpoint), "--against", str(tiny_llama)])
    short = tmp_path / "short.jsonl"
    short.write_text('{"text": "too little"}\n')
    with pytest.raises(PTQError, match="2,000 are needed"):
        command.main([str(checkpoint), "--against", str(MODEL), "--prompts", str(short)])


def test_the_limit_is_that_of_the_runs_report(tmp_path):
    folder = tmp_path / "checkpoint"
    assert kl_limit(folder)[1].startswith("that of any checkpoint")
    report = tmp_path / "report" / "report.json"
    report.parent.mkdir()
    report.write_text(json.dumps({"checks": [{"name": "kl", "limit": 0.02}], "known": None}))
    assert kl_limit(folder) == (0.02, "the threshold of its recipe")
    known = {"kl": 0.01, "recipe": "w4", "device": "a CPU"}
    report.write_text(json.dumps({"known": known}))
    assert kl_limit(folder) == (0.02, "2 times what w4 is known to lose")
    noisy = kl_limit(folder, 0.002)
    assert noisy == (0.022, "2 times what w4 is known to lose and the rounding of bf16")
    report.write_text(json.dumps({"known": known | {"device": "NVIDIA H100"}}))
    assert kl_limit(folder, 0.002) == kl_limit(folder)
    for text, fault in (
        ("no", "Invalid JSON"),
        ("[]", "should be an object"),
        ('{"known": {}}', "missing"),
    ):
        report.write_text(text)
        refused_checkpoint(rf"report\.json: .*{fault}.* `ptq report`", kl_limit, folder)


def test_cases_are_the_seeds_and_fit_their_length(own):
    first, again = context_cases(own), context_cases(own)
    assert first == again
    assert object_cases(own) == object_cases(own)
    assert context_cases(Setting(SMALL, 1, {}, {}, own.tokenizer, 1024)) != first
    for case in first:
        text = own.tokenizer.decode(case.ids)
        for question in case.questions:
            assert all(own.tokenizer.decode(choice) in text for choice in question.choices)
            assert len(case.ids) + len(question.ids) + 8 < 1024
    assert [q.depth for q in first[0].questions] == sorted(q.depth for q in first[0].questions)


def test_objects_are_judged_by_their_schema():
    schema = {
        "type": "object",
        "properties": {name: FIELDS[name][0] for name in ("name", "age", "open", "tags", "colour")},
    }
    good = {"name": "A", "age": 3, "open": True, "tags": ["x"], "colour": "red"}
    assert fits(good, schema)
    for wrong in (
        {"age": True}, {"age": "3"}, {"open": 1}, {"tags": [1]}, {"colour": "pink"}, {"more": 1}
    ):  # fmt: skip
        assert not fits(good | wrong, schema)
    assert not fits({"name": "A"}, schema)
    assert first_object('Here: {"a": 1} and more') == {"a": 1}
    assert first_object('{"a": ') is None
    assert first_object("none") is None


def test_loops_are_spans_that_run_to_the_end():
    assert repeats([9, 8, *[1, 2, 3] * 6])
    assert repeats([7] * 16)
    assert not repeats([7] * 15)
    assert not repeats([*[1, 2, 3] * 6, 9])
    assert not repeats(list(range(64)))
