"""Tasks of text: edits that are edits, outputs that are forced and nothing else, the command."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from calibrate.sources import STDLIB
from formats.command import run_command
from formats.errors import EngineError, RequestError
from formats.tokenizer import load_tokenizer
from inference.bench import command as bench
from inference.bench.load import Load, ask, run_once
from inference.bench.tasks import (
    MODULES,
    NOTES,
    REQUESTS,
    SIZES,
    Task,
    forced,
    library_functions,
    make_task,
    renamed,
)
from inference.config import EngineConfig, SpeculateConfig
from inference.engine import Engine
from inference.requests.request import SamplingParams

MODEL = Path(__file__).parents[3] / "recipes/tiny-python"
TEXT = '''\
def total(rows, size=0):
    """The size of rows."""
    for row in rows:
        size += row.size
        print("size", size, row)
    return rows
'''


def test_a_variable_is_renamed_and_nothing_else():
    """`size` is there most often, and an attribute's name, too."""
    edit = renamed(TEXT)
    assert (edit.old, edit.new) == ("row", "value")
    assert edit.text == TEXT.replace("row ", "value ").replace("row.", "value.").replace(
        "row)", "value)"
    )


@pytest.mark.parametrize(
    "source",
    [
        "def f(a):\n    return a + a\n",
        "def f(self):\n    return self.a, self.b, self.c\n",
        "def f():\n    return len(len(len(len(1))))\n",
        "def f(end):\n    return end, end, end, print(end=end)\n",
        "def f(a):\n    return a, a, a, f'{a}'\n",
    ],
)
def test_what_is_seldom_or_not_the_functions_own_is_not_renamed(source):
    assert renamed(source) is None


def name_of(node: ast.AST) -> str | None:
    return getattr(node, "id", getattr(node, "arg", None))


def test_all_edits_are_of_variables():
    assert set(MODULES) < set(STDLIB["evaluation"])
    sources = [source for module in library_functions() for source in module]
    edits = [(source, edit) for source in sources if (edit := renamed(source)) is not None]
    assert len(edits) > 200
    for source, edit in edits:
        ast.parse(edit.text)
        trees = (ast.walk(ast.parse(text)) for text in (source, edit.text))
        pairs = list(zip(*trees, strict=True))
        changed = [(a, b) for a, b in pairs if name_of(a) != name_of(b)]
        assert len(changed) >= 3
        for before, after in changed:
            assert isinstance(before, (ast.Name, ast.arg))
            assert type(before) is type(after)


def test_the_default_models_tasks_have_as_many_requests_as_are_told():
    tokenizer = load_tokenizer(MODEL)
    task = make_task("editing", MODEL, 64)
    assert len(task.prompts) == len(task.outputs or ()) == REQUESTS
    assert f"{REQUESTS} functions" in task.note
    assert "forced" in task.note
    for prompt, output, length in zip(task.prompts, task.outputs or (), task.lengths, strict=True):
        assert len(output) == length
        source, _, asked = tokenizer.decode(prompt).partition("\n\n\n# The same with ")
        old, new = asked.removesuffix(":\n").split(" renamed to ")
        edit = renamed(f"{source}\n")
        assert (edit.old, edit.new, edit.text) == (old, new, tokenizer.decode(output))
    task = make_task("repeated", MODEL, 24)
    assert task.outputs is None
    assert task.lengths == (24,) * REQUESTS
    assert all(SIZES.start // 2 <= len(prompt) < SIZES.stop // 2 for prompt in task.prompts)


@pytest.fixture(scope="module")
def editing(tiny_llama) -> Task:
    whole = make_task("editing", tiny_llama, 1)
    assert whole.outputs is not None
    few = slice(0, 3)
    return Task(
        name="editing",
        prompts=whole.prompts[few],
        lengths=whole.lengths[few],
        outputs=whole.outputs[few],
    )


def engine(folder, method: str | None = None, **config) -> Engine:
    drafts = None if method is None else SpeculateConfig.model_validate({"method": method})
    sizes = {"max_batch_size": 2, "prefix_cache": False, "speculate": drafts} | config
    return Engine.from_pretrained(folder, config=EngineConfig(**sizes))


def load_of(task: Task, batch: int = 2) -> Load:
    longest = max(map(len, task.prompts))
    return Load(batch=batch, prompt_tokens=longest, new_tokens=max(task.lengths), task=task)


@pytest.mark.parametrize(
    ("method", "config"),
    [
        (None, {}),
        ("ngram", {}),
        ("ngram", {"max_batched_tokens": 50}),
        ("suffix", {"kv_blocks": 12, "max_model_len": 512}),
    ],
)
def test_outputs_are_forced_whatever_is_drafted(tiny_llama, editing, method, config):
    runner = engine(tiny_llama, method, **config)
    forward = runner.loop.forward
    waves = ask(runner, load_of(editing))
    assert [len(wave) for wave in waves] == [2, 1]
    found = [tuple(output.token_ids) for wave in waves for output in wave]
    assert found == [*(editing.outputs or ())]
    assert runner.loop.forward is forward
    own = runner.generate([editing.prompts[0]], SamplingParams(max_tokens=9, ignore_eos=True))
    assert tuple(own[0].token_ids) != found[0][:9]


def test_a_run_of_a_task_counts_every_token(tiny_llama, editing):
    drafted, plain = engine(tiny_llama, "ngram"), engine(tiny_llama)
    for runner in (drafted, plain):
        run = run_once(runner, load_of(editing, 1))
        assert run.decode_tokens == sum(editing.lengths) - 3
        assert len(run.per_token_s) == run.decode_tokens
        assert len(run.first_token_s) == 3
        assert run.prefill_s >= sum(run.first_token_s) * 0.999
    assert run.drafts.steps == 0
    own = drafted.speculation
    assert own.accepted.sum() > 20


def test_texts_that_begin_alike_or_go_on_elsewhere_are_not_forced(tiny_llama):
    runner, params = engine(tiny_llama), SamplingParams(max_tokens=2)
    for texts in ([[5, 6, 7, 8], [5, 6, 9, 9]], [[7, 7, 7]]):
        with forced(runner, texts), pytest.raises(EngineError, match="exactly one has to"):
            runner.generate([[5, 6]], params)
    task = Task(name="editing", prompts=((5, 6), (7, 8)), lengths=(2, 2), outputs=((7, 8), (9, 10)))
    runner.loop = object()  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(RequestError, match="forced on the host"):
        ask(runner, load_of(task))


@pytest.mark.usefixtures("engines_here")
@pytest.mark.parametrize(("task", "method"), [("editing", "ngram"), ("repeated", "suffix")])
def test_the_command_tells_what_drafts_give(tiny_llama, tmp_path, capsys, task, method):
    file = tmp_path / "speed.json"
    words = ["--task", task, "--speculate", method, "--batch", "2", "--new", "20"]
    words += ["--depth", "4", "--repeats", "1", "--json", str(file)]  # auto may find none to pay
    assert bench.main([str(tiny_llama), *words]) == 0
    out, data = capsys.readouterr().out, json.loads(file.read_text())
    plain, own = data["results"]
    assert f"{own['requests']} requests of at most {own['prompt_tokens']} prompt" in out
    assert own["requests"] == plain["requests"] > 4
    assert (plain["drafts"], own["batch"]) == (None, 2)
    assert own["drafts"]["tokens_per_step"] > 1
    assert f"the speed of {tiny_llama}, no drafts" in out
    told = "Outputs are forced" if task == "editing" else "served before"
    assert sum(told in note for note in data["notes"]) == 1
    assert told in out
    if method == "suffix":  # all was served before
        assert own["drafts"]["accepted"][0] / own["drafts"]["proposed"][0] > 0.9
        assert own["new_tokens"] == 20


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--task", "editing"], "give it, too"),
        (["--task", "editing", "--speculate", "suffix"], "give --task repeated"),
        (["--task", "editing", "--speculate", "ngram", "--device", "cuda"], "on the host"),
        (["--task", "repeated", "--speculate", "suffix", "--against", "."], "of one checkpoint"),
        (["--task", "typing", "--speculate", "suffix"], "invalid choice"),
    ],
)
def test_what_a_task_cannot_tell_is_refused(tiny_llama, capsys, words, told):
    with pytest.raises(SystemExit):
        run_command(bench.main, [str(tiny_llama), *words])
    assert told in capsys.readouterr().err


def test_all_tasks_can_be_asked_for():
    assert (*NOTES,) == bench.TASKS


def test_a_task_needs_text(capsys):
    words = ["--shape", "llama-1.1b", "--scheme", "a8w4", "--task", "editing"]
    with pytest.raises(SystemExit):
        run_command(bench.main, [*words, "--speculate", "ngram"])
    assert "random weights have no text" in capsys.readouterr().err
