"""The predict command: prompts, streams, and arguments that are refused."""

import errno
import io

import pytest

from formats.command import run_command
from inference import predict
from inference.beam_search import BeamParams, beam_search
from inference.requests.request import SamplingParams
from tests.inference.predicting import SHORT, answered, greedy


@pytest.mark.parametrize("given", [None, "def add(a, b):\n"])
def test_a_prompt_is_completed(model, engine, monkeypatch, capsys, given):
    """From standard input it is taken as it is."""
    monkeypatch.setattr("sys.stdin", io.StringIO(given))
    assert predict.main([str(model), "--prompt", "-" if given else "def add(a", *SHORT]) == 0
    assert capsys.readouterr().out == greedy(engine, given or "def add(a") + "\n"


def test_the_length_of_a_request_can_be_chosen(model, capsys):
    arguments = [str(model), "--prompt", "def add(a", *SHORT, "--max-model-len"]
    assert run_command(predict.main, [*arguments, "3"]) == 2
    assert "no room in max_model_len 3; shorten it, or raise" in capsys.readouterr().err
    assert run_command(predict.main, [*arguments, "100"]) == 0
    with pytest.raises(SystemExit):
        predict.main([*arguments, "1"])


def test_streaming_prints_the_same_text_bit_by_bit(model, engine, monkeypatch, capsys):
    printed: list[str] = []

    def note(text: str = "", end: str = "\n", flush: bool = False, file: object = None) -> None:
        if file is None:
            printed.append(text + end)

    monkeypatch.setattr("builtins.print", note)
    longer = ["--max-tokens", "40"]
    assert predict.main([str(model), "--prompt", "def add(a", "--stream", *longer]) == 0
    whole = engine.generate(["def add(a"], SamplingParams(max_tokens=40))[0].text
    assert "".join(printed) == whole + "\n"
    assert len([text for text in printed if text]) > 2


def test_stop_texts_end_an_output(model, engine, capsys):
    text = greedy(engine, "def add(a")
    assert predict.main([str(model), "--prompt", "def add(a", "--stop", text[2:4], *SHORT]) == 0
    assert capsys.readouterr().out == text[: text.index(text[2:4])] + "\n"


def test_beams_are_searched_for_a_prompt_and_for_rows(model, engine, tmp_path, capsys):
    options = ["--beam-width", "3", "--length-penalty", "2", "--early-stopping", "never"]
    assert predict.main([str(model), "--prompt", "class Node:", *options, *SHORT]) == 0
    params = BeamParams(beam_width=3, length_penalty=2.0, early_stopping="never", max_tokens=6)
    prompts = ["class Node:", "import os"]
    texts = [found[0].text(engine.tokenizer) for found in beam_search(engine, prompts, params)]
    assert capsys.readouterr().out == texts[0] + "\n"
    rows = [{"src": prompt, "tgt": "x"} for prompt in prompts]
    found = answered(
        model, tmp_path, *rows, "{}", options=options, code=1
    )  # the last has no prompt
    assert [row["output"] for row in found] == [*texts, None]
    assert all(row["logprob"] < 0 for row in found[:2])


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--prompt", "x", "--input", "y"],
        ["--input", "x"],
        ["--prompt", "x", "--output", "y"],
        ["--input", "x", "--output", "y", "--stream"],
        ["--prompt", "x", "--prompt", "y"],
        ["--prompt", "x", "--batch-size", "0"],
        ["--prompt", "x", "--raw", "--system", "y"],
        ["--prompt", "x", "--length-penalty", "2"],
        ["--prompt", "x", "--beam-width", "2", "--temperature", "1"],
        ["--prompt", "x", "--beam-width", "2", "--stream"],
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments):
    with pytest.raises(SystemExit) as caught:
        predict.main(["model", *arguments])
    assert caught.value.code == 2


def test_sampling_options_are_checked_before_the_model_is_loaded(capsys):
    assert run_command(predict.main, ["no-model", "--prompt", "x", "--top-p", "2"]) == 2
    assert "error: top_p: " in capsys.readouterr().err


def test_a_full_disk_below_standard_output_is_no_defect(capsys):
    def prints(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    assert run_command(prints, []) == 2
    assert capsys.readouterr().err.startswith("error: [Errno 28] No space left on device, for what")
