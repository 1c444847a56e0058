"""Files of rows: their order, what a bad row costs, and how targets are scored."""

import json

import pytest
import torch

from formats.errors import CheckpointError, EngineError, RequestError
from inference import predict, rows
from inference.engine import Engine
from inference.prompts import PromptFormat
from inference.requests.request import RequestOutput, SamplingParams, StepResult
from tests.inference.predicting import answered, greedy, write


def test_rows_keep_order_and_keys(model, engine, tmp_path, capsys):
    rows = [{"src": f"x = {i}", "id": i, "tgt": f"y{i}"} for i in range(20)]
    rows[3].pop("tgt")
    rows[4] = {"tgt": None, "output": "of an earlier run", "src": "class Nöde:"}
    (tmp_path / "out.jsonl").write_text("old")
    options = ["--batch-size", "3"]
    found = answered(model, tmp_path, *rows[:10], "", *rows[10:], options=options)
    assert [row["src"] for row in found] == [row["src"] for row in rows]
    assert [row["output"] for row in found] == [greedy(engine, row["src"]) for row in rows]
    assert [row["tgt"] for row in found] == [row.get("tgt") for row in rows]
    assert [list(row) for row in found[3:5]] == [
        ["src", "tgt", "output", "id"],
        ["src", "tgt", "output"],
    ]
    assert found[7]["id"] == 7
    assert "20 rows" in capsys.readouterr().out
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.jsonl", "rows.jsonl"]


def test_a_seed_gives_each_row_the_same_text_in_any_company(model, tmp_path):
    sampled = ["--temperature", "1.5", "--top-k", "50", "--top-p", "0.9", "--seed", "3"]
    texts = []
    for sources in (["a", "b", "c"], ["b"]):
        rows = answered(model, tmp_path, *({"src": s} for s in sources), options=sampled)
        texts.append({row["src"]: row["output"] for row in rows})
    assert texts[0]["b"] == texts[1]["b"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{not json}", "line 2 is not JSON"),
        ("[1, 2]", "a row is an object"),
        ('{"text": "x"}', "one of the keys 'src' and 'messages'; found 'text'"),
        ('{"src": "x", "messages": []}', "found 'src', 'messages'"),
        ('{"src": 5}', "'src' is 5; needed is a text"),
        ('{"src": ""}', "'src' is \"\""),
        ('{"src": "x", "tgt": ["y"]}', "'tgt' is"),
        ('{"src": "\\ud800"}', "'src' holds half a surrogate pair"),
        ('{"src": "x", "tgt": "\\ud800"}', "'tgt' holds half a surrogate pair"),
        ('{"messages": "x"}', "'messages': found str; a chat is a list of messages"),
        ('{"messages": [{"from": "x", "value": "y"}]}', "known speakers"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "end with the assistant's"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "need a chat template"),
        (json.dumps({"src": "x " * 600}), "tokens leave no room in max_model_len 512"),
    ],
)
def test_a_bad_row_costs_that_row(model, engine, tmp_path, capsys, line, message):
    found = answered(model, tmp_path, {"src": "x = 1"}, line, {"src": "x = 2"}, code=1)
    assert [row["output"] for row in found] == [
        greedy(engine, "x = 1"),
        None,
        greedy(engine, "x = 2"),
    ]
    assert message in found[1]["error"]
    given = json.loads(line) if line.startswith('{"') else {}
    assert found[1].items() >= given.items()  # nothing of it is lost
    assert "error" not in found[0] | found[2]
    captured = capsys.readouterr()
    assert f"{tmp_path / 'rows.jsonl'}:2: {found[1]['error']}\n" in captured.err
    assert captured.out == f"3 rows, 1 failed: {tmp_path / 'out.jsonl'}\n"


def test_a_file_of_bad_rows_is_refused_before_the_model_is_loaded(tmp_path):
    path = write(tmp_path, "# not rows", '{"text": "x"}')
    with pytest.raises(RequestError, match=rf"{path}:1: line 1 is not JSON.*so it is with all"):
        predict.main(["no-model", "--input", str(path), "--output", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_many_failed_rows_are_told_in_a_few_lines(model, tmp_path, capsys):
    answered(model, tmp_path, {"src": "x"}, *["{"] * 9, code=1)
    lines = capsys.readouterr().err.splitlines()
    assert sum("is not JSON" in line for line in lines) == 5
    assert lines[-1] == "and 4 rows more; their `error` says why"


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xff\xfe", b"PAR1\xb0"])
def test_files_without_rows_are_refused(tmp_path, content):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(RequestError, match=r"found no rows|not a readable UTF-8") as caught:
        predict.main(["no-model", "--input", str(path), "--output", str(tmp_path / "out")])
    assert '{"src": "..."}' in str(caught.value)


def test_a_model_that_gives_nan_costs_the_row(engine, tmp_path, capsys):
    path = write(tmp_path, '{"src": "fine"}', '{"src": "broken", "tgt": "x"}')

    class Broken:
        """Answers what it is asked for, but for the longest prompts, which fail."""

        tokenizer = engine.tokenizer

        def __init__(self) -> None:
            self.asked: dict[str, list[int]] = {}

        @property
        def has_unfinished(self) -> bool:
            return bool(self.asked)

        def add_request(self, prompt: list[int], params: SamplingParams) -> str:
            self.asked[str(len(self.asked))] = prompt
            return str(len(self.asked) - 1)

        def advance(self) -> StepResult:
            first, *others = self.asked
            self.asked.clear()
            bad = [RequestOutput(n, [1], finish_reason="error", error="NaN") for n in others]
            good = RequestOutput(first, [1], pieces=["done"], finish_reason="stop")
            return StepResult(finished=[good, *bad])

        def stream(self, prompt: str, params: SamplingParams):
            yield RequestOutput("0", [1], finish_reason="error", error="NaN")

    broken: Engine = Broken()  # pyright: ignore[reportAssignmentType]
    prompts = PromptFormat.of(engine.tokenizer)
    found = rows.answer_rows(broken, rows.read_rows(path), prompts, SamplingParams())
    assert [answer.output for answer in found] == ["done", None]
    assert [answer.error for answer in found] == [None, "the completion failed: NaN"]
    assert found[1].logprob is None
    with pytest.raises(EngineError, match="the completion failed: NaN"):
        predict.complete(broken, "x", SamplingParams(), stream=True)
    assert capsys.readouterr().out == ""


def test_an_output_that_cannot_be_written_is_told_before_the_work(tmp_path):
    path = write(tmp_path, '{"src": "x"}')
    (tmp_path / "file").touch()
    for out in (tmp_path / "file" / "out", tmp_path):
        with pytest.raises(CheckpointError, match="cannot be written"):
            predict.main(["no-model", "--input", str(path), "--output", str(out)])
    with pytest.raises(CheckpointError, match="cannot be written"):
        rows.write_rows(tmp_path / "file" / "out", rows.read_rows(path), [rows.Answer("y")])


def test_targets_are_compared_and_scored(model, engine, tmp_path, capsys):
    text = greedy(engine, "def add(a")
    given = [
        {"src": "def add(a", "tgt": f"  {text}\n", "logprob": "of an earlier run"},
        {"src": "def add(a", "tgt": ", b):"},
        {"src": "def add(a"},
        {"src": "def add(a", "tgt": ""},
    ]
    found = answered(model, tmp_path, *given)
    assert [row.get("exact_match") for row in found] == [True, False, None, False]
    assert "logprob" not in found[2]
    assert (found[3]["logprob"], found[3]["tgt_tokens"]) == (0.0, 0)
    total = tokens = 0
    for row in found[:2]:
        prompt = engine.tokenizer("def add(a")["input_ids"]
        target = engine.tokenizer(row["tgt"], add_special_tokens=False)["input_ids"]
        logits = engine.score(prompt + target)[len(prompt) - 1 : -1].double()
        want = logits.log_softmax(-1).gather(-1, torch.tensor(target)[:, None]).sum().item()
        assert row["logprob"] == pytest.approx(want, abs=1e-3)
        assert row["tgt_tokens"] == len(target)
        total, tokens = total + row["logprob"], tokens + len(target)
    assert capsys.readouterr().out == (
        f"4 rows, exact match 33.3% of 3, mean log probability {total / tokens:.4f} per token of "
        f"{tokens}: {tmp_path / 'out.jsonl'}\n"
    )


def test_a_target_too_long_to_be_scored_leaves_the_output(model, engine, tmp_path):
    (row,) = answered(model, tmp_path, {"src": "x = 1", "tgt": "y " * 600}, code=1)
    assert row["output"] == greedy(engine, "x = 1")
    assert row["error"].startswith("tgt: it cannot be scored after its prompt (prompt: ")
    assert (row["exact_match"], row["logprob"]) == (False, None)
