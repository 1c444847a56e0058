"""The file of a sweep: what it says, what is wrong with it, and the tasks that come of it."""

from pathlib import Path
from textwrap import dedent

import pytest

from formats.errors import RecipeError
from ptq.sweep import tasks
from ptq.sweep.tasks import Resources, plan_tasks, read_spec
from tests.refusals import refused_recipe

SPEC = """\
models: [tiny-python, {path: models/other, name: other}]
recipes:
  - w8_rtn
  - {recipe: mine.yaml, set: [scheme=w4], resources: {cpus: 2, gpus: 1}}
set: [dataset.calibration.samples=8]
output: OUT
"""


@pytest.fixture
def folder(tmp_path, make_model) -> Path:
    (tmp_path / "models").mkdir()
    (tmp_path / "models/other").symlink_to(make_model())
    (tmp_path / "mine.yaml").write_text("base: w8_rtn\n")
    return tmp_path


def write(folder: Path, text: str) -> Path:
    path = folder / "sweep.yaml"
    path.write_text(text.replace("OUT", str(folder / "out")))
    return path


def test_each_recipe_is_a_task_on_each_model(folder):
    tasks = plan_tasks(read_spec(write(folder, SPEC)), folder)
    assert [task.name for task in tasks] == [
        "tiny-python/w8_rtn",
        "tiny-python/mine",
        "other/w8_rtn",
        "other/mine",
    ]
    last = tasks[-1]
    assert last.output == folder / "out/other/mine"
    assert last.resources == Resources(cpus=2, gpus=1)
    assert tasks[0].resources == Resources(cpus=1, gpus=0)
    assert last.command == (
        f"ptq run {folder}/mine.yaml --set model.path={folder}/models/other "
        f"--set dataset.calibration.samples=8 --set scheme=w4 --output {folder}/out/other/mine"
    )
    assert len({task.settings for task in tasks}) == 4
    changed = write(folder, SPEC.replace("samples=8", "samples=9"))
    assert {t.settings for t in plan_tasks(read_spec(changed), folder)}.isdisjoint(
        {task.settings for task in tasks}
    )


def test_the_example_of_the_docs_names_keys_that_there_are(folder):
    text = dedent((tasks.__doc__ or "").split("\n\n")[1]).replace("/models/mine", "models/other")
    planned = plan_tasks(read_spec(write(folder, text)), folder)
    assert [task.recipe for task in planned] == ["w8_rtn", "gptq_64"] * 2


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("gpus: 1", "gpu: 1", r"sweep.yaml:4: recipes.1.resources.gpu: unknown key; did you mean"),
        ("gpus: 1", "gpus: -1", r"recipes.1.resources.gpus: found -1; needed is .* at least 0"),
        ("cpus: 2", "cpus: 1.5", r"cpus: found 1.5; needed is a whole number"),
        ("output: OUT", "", r"output: missing; this key is needed"),
        ("- w8_rtn", "- w8_rtn\n  - w8_rtn", r"two are called 'w8_rtn'; give one .* `name:`"),
        ("name: other", "name: a/b", r"'a/b' cannot be the name of a folder"),
        ("set: [d", "set: d", r"sweep.yaml:5: not valid YAML|needed is a list"),
        (SPEC, "[]", r"found no keys; a sweep needs models, recipes and output"),
        ("models: [tiny-python, ", "models: [7, ", r"models.0: found 7; needed is a mapping"),
        ("models: [", "models: []\nother: [", r"models: found an empty list; needed is 1 or more"),
    ],
)
def test_what_is_wrong_is_told_with_its_line_and_what_is_allowed(folder, old, new, told):
    assert old in SPEC
    with pytest.raises(RecipeError, match=told):
        read_spec(write(folder, SPEC.replace(old, new)))


def test_every_task_that_cannot_run_is_told_before_any_runs(folder):
    text = SPEC.replace("scheme=w4", "scheme=w44").replace("models/other", "./nowhere")
    with pytest.raises(RecipeError) as error:
        plan_tasks(read_spec(write(folder, text)), folder)
    told = str(error.value)
    assert told.startswith("3 of 4 tasks cannot run")
    assert "tiny-python/mine: --set scheme=w44: unknown" in told
    assert "other/w8_rtn: models: ./nowhere: model.path: no such folder" in told
    assert not (folder / "out").exists()


def test_a_file_that_is_not_there(tmp_path):
    refused_recipe(r"cannot be read \(No such file or directory\)", read_spec, tmp_path / "none")
    (tmp_path / "latin").write_bytes(b"models: [\xe4]")
    refused_recipe("it is no UTF-8: .*Give the YAML file of a sweep", read_spec, tmp_path / "latin")
