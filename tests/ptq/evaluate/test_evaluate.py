"""Tasks of lm-eval on our engine: equal to transformers', and told beside another model's."""

import errno
import json
from copy import deepcopy
from itertools import islice
from unittest.mock import Mock

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM

from formats.errors import EngineError, RequestError
from inference.config import EngineConfig
from inference.engine import Engine
from ptq import cli
from ptq.evaluate import evaluation, local_tasks
from ptq.evaluate.answers import likelihoods
from ptq.evaluate.evaluation import EngineLM, _expanded, _task, evaluate, sampling_params
from ptq.evaluate.figures import Metric, recovery
from ptq.evaluate.local_tasks import FUNCTIONS, passes
from ptq.recipe.own_model import shipped_paths
from tests.adapters import write_adapter
from tests.ptq.quantizing import settings
from tests.refusals import refused_request

MODEL = shipped_paths()["w4_gptq"].parent / "tiny-python"


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """Tasks make no more items than are asked for here."""
    monkeypatch.setattr(local_tasks, "ITEMS", 20)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.from_pretrained(MODEL, config=EngineConfig(max_batch_size=8))


@pytest.fixture(scope="module")
def lm(engine: Engine) -> EngineLM:
    return EngineLM(engine, progress=False)


@pytest.fixture(scope="module")
def transformers_model():
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


def text_of(lm: EngineLM) -> local_tasks.Text:
    return local_tasks.Text(encode=lm.tok_encode, longest=lm.max_length)


def ask(kind: str, *args: tuple) -> list[Instance]:
    return [Instance(kind, {}, a, i) for i, a in enumerate(args)]  # pyright: ignore


@torch.no_grad()
def likelihood(model, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """What transformers' model says of a continuation."""
    ids = torch.tensor([context + continuation])
    rows = model(ids).logits[0, len(context) - 1 : -1].log_softmax(-1)
    own = rows.gather(1, torch.tensor(continuation)[:, None])
    return own.sum().item(), bool((rows.argmax(-1) == torch.tensor(continuation)).all())


def test_likelihoods_of_continuations_are_those_of_transformers(lm, transformers_model):
    items = list(islice(local_tasks.choice(text_of(lm)), 3))
    pairs = [(item["context"], text) for item in items for text in item["choices"]]
    found = lm.loglikelihood(ask("loglikelihood", *pairs))
    for pair, (ours, greedy) in zip(pairs, found, strict=True):
        theirs, likeliest = likelihood(transformers_model, *lm._encode_pair(*pair))
        assert ours == pytest.approx(theirs, abs=1e-4)
        assert greedy == likeliest


def test_choices_of_an_item_share_what_is_computed_of_its_context(engine, lm):
    (item,) = islice(local_tasks.choice(text_of(lm)), 7, 8)
    before = engine.stats()
    lm.loglikelihood(ask("loglikelihood", *[(item["context"], c) for c in item["choices"]]))
    after, tokens = engine.stats(), len(lm.tok_encode(item["context"]))
    assert after.hit_tokens - before.hit_tokens >= 3 * (tokens // 64 * 64)


def test_choices_of_one_token_take_one_request_but_the_unlikely_ones(
    engine, lm, transformers_model, monkeypatch
):
    context, asked = lm.tok_encode("def add(a, b):\n    return"), []
    with torch.no_grad():
        order = transformers_model(torch.tensor([context])).logits[0, -1].argsort(descending=True)
    choices = [order[i].item() for i in (1, 0, 50, -1)]
    add = engine.add_request
    monkeypatch.setattr(engine, "add_request", lambda *own: asked.append(own) or add(*own))
    pairs = [*((context, [token]) for token in choices), (context[:-1], context[-1:])]
    bar = Mock()
    found = likelihoods(engine, pairs, bar)
    assert [len(ids) - len(context) for ids, _ in asked] == [0, 0, 1]
    assert bar.update.call_count == len(pairs)
    for pair, (ours, greedy) in zip(pairs, found, strict=True):
        theirs, likeliest = likelihood(transformers_model, *pair)
        assert (ours, greedy) == (pytest.approx(theirs, abs=1e-4), likeliest)


def test_an_empty_context_is_the_beginning_of_a_text(lm, transformers_model):
    (found,) = lm.loglikelihood(ask("loglikelihood", ("", "import os")))
    expected = likelihood(transformers_model, [lm.prefix_token_id], lm.tok_encode("import os"))
    assert found[0] == pytest.approx(expected[0], abs=1e-4)


def test_a_text_that_begins_with_bos_gets_no_second_one(engine, lm, monkeypatch):
    """As one that a chat template has rendered; also where it is scored as a whole."""
    bos, text = lm.prefix_token_id, "import os"
    rolling = [("loglikelihood_rolling", (t,)) for t in (text, f"{lm.tokenizer.bos_token}{text}")]
    plain, begun = (lm.loglikelihood_rolling(ask(kind, args))[0] for kind, args in rolling)
    assert plain == begun
    tokenizer = deepcopy(lm.tokenizer)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A <|endoftext|>", special_tokens=[("<|endoftext|>", bos)]
    )
    monkeypatch.setattr(lm, "tokenizer", tokenizer)
    both = lm.tok_encode(text), lm.tok_encode(f"<|endoftext|>{text}")
    assert both[0] == both[1]
    assert both[0].count(bos) == 2  # at the beginning and at the end


def test_a_text_longer_than_the_context_is_scored_in_windows(transformers_model):
    sizes = EngineConfig(max_batch_size=2, max_model_len=66)
    lm = EngineLM(Engine.from_pretrained(MODEL, config=sizes), progress=False)
    text = "".join(f"x{i} = {i}\n" for i in range(30))
    (ours,) = lm.loglikelihood_rolling(ask("loglikelihood_rolling", (text,)))
    ids, expected = [lm.prefix_token_id, *lm.tok_encode(text)], 0.0
    for first in range(1, len(ids), 64):  # each token is told from what fits before it
        end = min(first + 64, len(ids))
        expected += likelihood(transformers_model, ids[max(0, end - 65) : first], ids[first:end])[0]
    assert ours == pytest.approx(expected, abs=1e-3)


def test_completions_end_where_the_task_says(lm):
    options = {"until": ["\n"], "max_gen_toks": 20}
    (text,) = lm.generate_until(ask("generate_until", ("def add(a, b):\n    return", options)))
    assert text == " a + b"


def test_a_context_is_cut_on_its_left(lm):
    context = "x = 1\n" * 2000 + "def add(a, b):\n    return"
    (text,) = lm.generate_until(ask("generate_until", (context, {"until": ["\n"]})))
    assert text


def test_drawn_completions_have_the_asked_temperature():
    drawn = sampling_params({"until": "END", "do_sample": True, "temperature": 0.5}, 100)
    assert (drawn.temperature, drawn.stop, drawn.max_tokens) == (0.5, ("END",), 99)
    assert sampling_params({"temperature": 0.5, "do_sample": False}, 100).temperature == 0


@pytest.mark.parametrize("name", local_tasks.NAMES)
def test_every_local_task_runs(engine, name, monkeypatch):
    """In this process alone: a pool forked from one with threads can wait forever."""

    def refuse(*_):
        raise AssertionError("lm-eval forks a pool")

    monkeypatch.setattr("multiprocessing.Pool", refuse)
    found = evaluate(engine, [name], limit=2, allow_code=True, progress=False)
    assert {m.task for m in found} == {name}
    assert all(m.value == m.value for m in found)


def test_local_stands_for_all_that_run_no_code():
    assert set(_expanded("local", allow_code=False)) == {*local_tasks.NAMES} - {"python_functions"}
    assert set(_expanded("local", allow_code=True)) == {*local_tasks.NAMES}


def test_needles_fill_the_context(lm):
    item = local_tasks.needle(text_of(lm))[0]
    count = len(lm.tok_encode(item["context"] + item["choices"][0]))
    assert lm.max_length - 64 < count <= lm.max_length
    name, number = item["context"].split("\n")[0].split(" = ")
    assert item["choices"][item["answer"]] == f" {number}"
    assert item["context"].endswith(f"assert {name} ==")


def test_what_a_model_wrote_runs_only_where_that_is_allowed(engine):
    refused_request("--allow-code", evaluate, engine, ["python_functions"], progress=False)


def test_an_unknown_task_is_refused_with_a_near_one(lm):
    refused_request("python_cloze", _task, "python_close", lm, TaskManager(include_defaults=False))


@pytest.mark.ci  # lm-eval reads thousands of files
def test_a_task_of_lm_eval_is_named_by_a_near_one(lm):
    with pytest.raises(RequestError, match="did you mean hellaswag") as caught:
        _task("helaswag", lm, TaskManager())
    assert len(str(caught.value)) < 500, "and not all of thousands"


@pytest.mark.parametrize(
    ("code", "holds"),
    [
        (FUNCTIONS[0][0] + " a + b", True),
        (FUNCTIONS[0][0] + " a - b", False),
        ("while True:\n    pass", False),
        ("with open('left', 'w') as f: f.write('x')\ndef add(a, b):\n    return a + b", False),
        ("import os\nif os.fork() == 0:\n    os._exit(0)\ndef add(a, b): return a + b", None),
    ],
    ids=["right", "wrong", "endless", "writes", "forks"],
)
def test_code_runs_in_a_process_with_limits(code, holds, monkeypatch):
    if code.startswith("while"):  # others may wait long for a processor
        monkeypatch.setattr("ptq.evaluate.local_tasks.SECONDS", 1)
    found = passes(code, FUNCTIONS[0][1])
    assert holds is None or found == holds


def metric(right: list[int]) -> Metric:
    each = dict(enumerate(map(float, right)))
    return Metric(
        task="t",
        name="acc",
        value=sum(right) / len(right),
        stderr=None,
        higher_is_better=True,
        items=len(right),
        each=each,
    )


def test_data_that_cannot_be_had_are_refused_by_their_task(engine, monkeypatch):
    def unreachable(*_, **__):
        raise ConnectionError("Couldn't reach 'Rowan/hellaswag' on the Hub")

    monkeypatch.setattr(evaluation.evaluator, "simple_evaluate", unreachable)
    with pytest.raises(RequestError, match=r"needle: its data cannot be had \(Couldn't reach"):
        evaluate(engine, ["needle"], progress=False)


def test_what_this_machine_lacks_is_not_said_to_be_the_hubs(engine, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device", "/cache/datasets")

    monkeypatch.setattr(evaluation.evaluator, "simple_evaluate", full)
    with pytest.raises(EngineError, match=r"needle: .*No space left.*/cache/datasets") as error:
        evaluate(engine, ["needle"], progress=False)
    assert "hub" not in str(error.value)
    assert "network" not in str(error.value)


def test_recovery_is_of_paired_items():
    found = recovery(metric([1, 0, 1, 1, 0, 1] * 20), metric([1, 1, 1, 1, 0, 0] * 20))
    assert (found.ratio, found.lost, found.won) == (1.0, 20, 20)
    assert found.interval is not None
    low, high = found.interval
    assert 0.8 < low < 1 < high < 1.25
    assert recovery(metric([0, 0]), metric([0, 0])).ratio is None


def test_the_command_tells_what_is_left_of_the_original(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)  # of no git repository, of which nobody is to be told
    file = tmp_path / "figures.json"
    words = ["eval", str(MODEL), "--tasks", "python_choice", "--limit", "3", "--quiet"]
    assert cli.main([*words, "--against", str(MODEL), "--output", str(file)]) == 0
    out, err = capfd.readouterr()
    assert "git" not in err
    assert "100.0%" in out
    assert "0 lost, 0 won" in out
    told = json.loads(file.read_text())
    assert told["checkpoint"] == told["against"]
    assert set(told["checkpoint"][0]["each"]) == {"0", "1", "2"}


def test_tasks_run_with_an_adapter(lm, tmp_path, monkeypatch, capsys):
    folder = write_adapter(tmp_path / "sql", MODEL, scale=0.2)
    adapted = Engine.from_pretrained(MODEL, adapters={"sql": folder})
    own = EngineLM(adapted, adapter="sql", progress=False)
    pair = ("def add(a, b):\n", "    return a")
    context, continuation = own._encode_pair(*pair)
    ids = torch.tensor(context + continuation)
    rows = adapted.score(ids, adapter="sql")[len(context) - 1 : -1].log_softmax(-1)
    wanted = rows.gather(1, torch.tensor(continuation)[:, None]).sum().item()
    (found,), (without,) = (one.loglikelihood(ask("loglikelihood", pair)) for one in (own, lm))
    assert found[0] == pytest.approx(wanted, abs=1e-4)
    assert abs(found[0] - without[0]) > 0.01

    seen = list[tuple[str | None, dict]]()
    monkeypatch.setattr(
        "ptq.evaluate.evaluation.evaluate",
        lambda engine, names, *, adapter, **_: seen.append((adapter, engine.adapters)) or [],
    )
    words = ["eval", str(MODEL), "--tasks", "local", "--adapter", f"sql={folder}"]
    assert cli.main([*words, "--against", str(MODEL)]) == 0
    assert seen == [("sql", {"sql": folder})] * 2
    with pytest.raises(SystemExit):
        cli.main([*words, "--adapter", f"poet={folder}"])
    assert "one adapter at a time" in capsys.readouterr().err


def test_the_command_names_what_is_missing(monkeypatch, capsys):
    monkeypatch.setattr("ptq.commands.eval.find_spec", lambda _: None)
    assert cli.main(["eval", str(MODEL), "--tasks", "local"]) == 2
    assert "ptq[eval]" in capsys.readouterr().err


@pytest.mark.usefixtures("unpictured")
def test_a_report_tells_of_the_tasks_that_its_recipe_names(tmp_path, capsys):
    words = ["run", "w8_rtn", "--output", str(tmp_path / "out"), "--quiet"]
    few = settings("report.tasks=[python_choice]", "report.task_items=4")
    assert cli.main([*words, *few]) == 0
    page = (tmp_path / "out/report/report.md").read_text()
    assert "Standard tasks" in page
    (row,) = json.loads((tmp_path / "out/report/report.json").read_text())["tasks"]
    assert row["quantized"]["items"] == row["original"]["items"] == 4
