"""The predict command: prompts, streams, files of rows, and what is refused."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from formats.command import run_command
from formats.errors import CheckpointError, EngineError, RequestError
from inference import predict
from inference.engine import Engine
from inference.scheduling.request import RequestOutput, SamplingParams

SHORT = ["--max-tokens", "6"]


@pytest.fixture(scope="module")
def model(tiny_llama, make_quantized) -> Path:
    return make_quantized(tiny_llama)


@pytest.fixture(scope="module")
def engine(model) -> Engine:
    return Engine.from_pretrained(model)


def greedy(engine: Engine, prompt: str) -> str:
    return engine.generate([prompt], SamplingParams(max_tokens=6))[0].text


def write(folder: Path, *lines: str) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def test_a_prompt_is_completed(model, engine, capsys):
    assert predict.main([str(model), "--prompt", "def add(a", *SHORT]) == 0
    assert capsys.readouterr().out == greedy(engine, "def add(a") + "\n"


def test_the_length_of_a_request_can_be_chosen(model, capsys):
    arguments = [str(model), "--prompt", "def add(a", *SHORT, "--max-model-len"]
    assert run_command(predict.main, [*arguments, "3"]) == 2
    assert "no room in max_model_len 3; shorten it, or raise" in capsys.readouterr().err
    assert run_command(predict.main, [*arguments, "100"]) == 0
    with pytest.raises(SystemExit):
        predict.main([*arguments, "1"])


def test_streaming_prints_the_same_text_bit_by_bit(model, engine, monkeypatch, capsys):
    printed: list[str] = []

    def note(text: str = "", end: str = "\n", flush: bool = False) -> None:
        printed.append(text + end)

    monkeypatch.setattr("builtins.print", note)
    longer = ["--max-tokens", "40"]
    assert predict.main([str(model), "--prompt", "def add(a", "--stream", *longer]) == 0
    whole = engine.generate(["def add(a"], SamplingParams(max_tokens=40))[0].text
    assert "".join(printed) == whole + "\n"
    assert len([text for text in printed if text]) > 2


def test_a_prompt_from_standard_input_is_taken_as_it_is(model, engine, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("def add(a, b):\n"))
    assert predict.main([str(model), "--prompt", "-", *SHORT]) == 0
    assert capsys.readouterr().out == greedy(engine, "def add(a, b):\n") + "\n"


def test_rows_keep_order_and_keys(model, engine, tmp_path, capsys):
    rows = [{"src": f"x = {i}", "id": i, "tgt": f"y{i}"} for i in range(20)]
    rows[3].pop("tgt")
    rows[4] = {"tgt": None, "output": "of an earlier run", "src": "class Nöde:"}
    source = write(
        tmp_path, *(json.dumps(row) for row in rows[:10]), "", *map(json.dumps, rows[10:])
    )
    out = tmp_path / "out.jsonl"
    out.write_text("old")
    arguments = [str(model), "--input", str(source), "--output", str(out), *SHORT]
    assert predict.main([*arguments, "--batch-size", "3"]) == 0
    found = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
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
    sampled = ["--temperature", "1.5", "--top-k", "50", "--top-p", "0.9", "--seed", "3", *SHORT]
    texts = []
    for sources in (["a", "b", "c"], ["b"]):
        path = write(tmp_path, *(json.dumps({"src": s}) for s in sources))
        out = tmp_path / "out.jsonl"
        assert predict.main([str(model), "--input", str(path), "--output", str(out), *sampled]) == 0
        rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
        texts.append({row["src"]: row["output"] for row in rows})
    assert texts[0]["b"] == texts[1]["b"]


def test_stop_texts_end_an_output(model, engine, capsys):
    text = greedy(engine, "def add(a")
    assert predict.main([str(model), "--prompt", "def add(a", "--stop", text[2:4], *SHORT]) == 0
    assert capsys.readouterr().out == text[: text.index(text[2:4])] + "\n"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{not json}", "not JSON"),
        ("[1, 2]", "a row is an object"),
        ('{"text": "x"}', "no key 'src'; found 'text'"),
        ('{"src": 5}', "'src' is 5; needed is a text"),
        ('{"src": ""}', "'src' is \"\""),
        ('{"src": "x", "tgt": ["y"]}', "'tgt' is"),
        ('{"src": "\\ud800"}', "half a surrogate pair"),
    ],
)
def test_bad_rows_are_named_before_the_model_is_loaded(tmp_path, line, message):
    path = write(tmp_path, '{"src": "fine"}', line)
    with pytest.raises(RequestError, match=message) as caught:
        predict.main(["no-model", "--input", str(path), "--output", str(tmp_path / "out")])
    assert str(caught.value).startswith(f"{path}:2: ")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xff\xfe"])
def test_files_without_rows_are_refused(tmp_path, content):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(RequestError, match=r"found no rows|not a readable UTF-8"):
        predict.main(["no-model", "--input", str(path), "--output", str(tmp_path / "out")])


def test_a_row_that_is_too_long_is_named_and_nothing_stays_behind(engine, tmp_path):
    path = write(tmp_path, '{"src": "fine"}', json.dumps({"src": "x " * 600}))
    with pytest.raises(RequestError, match=rf"{path}:2: prompt: .* tokens leave no room"):
        predict.complete_rows(engine, predict.read_rows(path), SamplingParams(), path)
    assert not engine.has_unfinished
    engine.check_integrity()


def test_a_model_that_gives_nan_names_the_row(engine, tmp_path, monkeypatch, capsys):
    path = write(tmp_path, '{"src": "fine"}', '{"src": "broken"}')

    class Broken:
        has_unfinished = True

        def add_request(self, prompt: str, params: SamplingParams) -> str:
            return prompt

        def step(self) -> list[RequestOutput]:
            return [RequestOutput("broken", [1], finish_reason="error", error="NaN")]

        def stream(self, prompt: str, params: SamplingParams):
            yield from self.step()

    broken: Engine = Broken()  # pyright: ignore[reportAssignmentType]
    with pytest.raises(EngineError, match=f"{path}:2: the completion failed: NaN"):
        predict.complete_rows(broken, predict.read_rows(path), SamplingParams(), path)
    with pytest.raises(EngineError, match="the completion failed: NaN"):
        predict.complete(broken, "x", SamplingParams(), stream=True)
    assert capsys.readouterr().out == ""


def test_an_output_that_cannot_be_written_is_one_clear_error(model, tmp_path):
    path = write(tmp_path, '{"src": "x"}')
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot be written"):
        predict.write_rows(tmp_path / "file" / "out", predict.read_rows(path), ["y"])


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--prompt", "x", "--input", "y"],
        ["--input", "x"],
        ["--prompt", "x", "--output", "y"],
        ["--input", "x", "--output", "y", "--stream"],
        ["--prompt", "x", "--batch-size", "0"],
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments):
    with pytest.raises(SystemExit) as caught:
        predict.main(["model", *arguments])
    assert caught.value.code == 2


def test_sampling_options_are_checked_before_the_model_is_loaded(capsys):
    assert run_command(predict.main, ["no-model", "--prompt", "x", "--top-p", "2"]) == 2
    assert "error: top_p: " in capsys.readouterr().err
