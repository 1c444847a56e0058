"""The project works from the checkout, an editable install and a wheel, beside a foreign `kernels`.

Each case is a virtual environment of its own that borrows this one's dependencies. The stand-in
for Hugging Face's `kernels` has a version that the installed transformers accepts, so that
`import transformers` really takes names from it; the others are outside the accepted range.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from tests.e2e.installed import ROOT, environment, run

PROBE = """
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer
import torch, sys
folder = sys.argv[1]
model = AutoModelForCausalLM.from_pretrained(folder)
ids = AutoTokenizer.from_pretrained(folder)("import os", return_tensors="pt").input_ids
assert model.generate(ids, max_new_tokens=3, do_sample=False).shape[1] > ids.shape[1]
import ptq
from kernels.ops import quantize_static
from kernels.numerics import choose_scale
assert quantize_static(torch.ones(1, 4), torch.tensor(0.5)).tolist() == [[2, 2, 2, 2]]
import kernels
print(getattr(kernels, "__version__", "namespace"))
"""


def accepted_version() -> str:
    """A version of the foreign package inside the range that transformers accepts."""
    from transformers.utils.import_utils import KERNELS_MIN_VERSION

    return KERNELS_MIN_VERSION


def write_stand_in(site: Path, version: str) -> None:
    """A foreign `kernels`: answers any name with a harmless class or decorator."""
    package = site / "kernels"
    (package / "layer").mkdir(parents=True, exist_ok=True)
    body = f"""
__version__ = "{version}"

class _Anything:
    def __init__(self, *args, **kwargs): pass
    def __call__(self, target=None, *args, **kwargs): return target
    def __getattr__(self, name): return _Anything()

def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    if name.startswith("use_"):
        return lambda *args, **kwargs: (lambda target: target)
    return type(name, (_Anything,), {{}})
"""
    for path in ("__init__.py", "layer/__init__.py", "layer/mode.py"):
        (package / path).write_text(body)
    info = site / f"kernels-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {version}\n")
    (info / "top_level.txt").write_text("kernels\n")
    (info / "RECORD").write_text("kernels/__init__.py,,\n")


@pytest.mark.ci
@pytest.mark.parametrize(
    ("layout", "foreign"),
    [
        ("checkout", "absent"),
        ("checkout", "0.1.0"),
        ("editable", "accepted"),
        ("wheel", "accepted"),
    ],
)
def test_works_beside_a_foreign_kernels_package(tmp_path, layout, foreign, wheel, tiny_llama):
    python, site = environment(tmp_path / "env", layout, wheel)
    if foreign != "absent":
        write_stand_in(site, accepted_version() if foreign == "accepted" else foreign)
    cwd = ROOT if layout == "checkout" else tmp_path
    probe = tmp_path / "probe.py"
    probe.write_text(PROBE)
    # `-c`, so that the checkout's folder (not the probe's) is the first on the path
    code = f"exec(open({str(probe)!r}).read())"
    done = run([str(python), "-c", code, str(tiny_llama)], cwd)
    expected = {"absent": "namespace", "accepted": accepted_version()}.get(foreign, foreign)
    assert done.stdout.split()[-1] == expected
    command = [str(python), "-m", "ptq"] if layout == "checkout" else [str(python.parent / "ptq")]
    assert "run" in run([*command, "--help"], cwd).stdout
    if layout == "wheel":  # the continuous integration quantizes in an editable install
        quantize_there(python, cwd, "a8w8c8", tiny_llama)
        listed = json.loads(run([*command, "recipes", "--json"], cwd).stdout)
        assert {Path(row["path"]).parent.parent for row in listed} >= {site}
        plan = run([*command, "check", "a8w8c8", "--no-time"], cwd).stdout
        assert f"model        {site / 'recipes' / 'tiny-python'}: llama" in plan


def quantize_there(python: Path, cwd: Path, recipe: str, model: Path) -> None:
    """The command of the README in that environment, on a small model."""
    command = [str(python), "-m", "ptq.run", recipe]
    for override in (
        f"model.path={model}",
        f"output.path={cwd / 'out'}",
        "dataset.calibration.samples=4",
        "dataset.calibration.sequence_length=64",
        "dataset.evaluation.samples=2",
        "dataset.evaluation.sequence_length=64",
        "report.speed=false",
        "report.thresholds.perplexity_ratio=null",
        "report.thresholds.kl=null",
    ):
        command += ["--set", override]
    run(command, cwd)
    assert (cwd / "out" / "checkpoint" / "model.safetensors").exists()


@pytest.mark.ci  # builds it
def test_the_wheel_holds_all_that_is_read_beside_the_code(wheel):
    """Recipes, the default model, kernels' sources and tuning tables, scripts of peers; no tests."""
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"recipes/a8w8c8.yaml", "recipes/tiny-python/model.safetensors"} <= names
    for package in ("ptq", "calibrate", "formats", "inference", "kernels", "recipes"):
        files = {
            str(path.relative_to(ROOT))
            for path in (ROOT / package).rglob("*")
            if path.is_file() and not {"__pycache__", "_native"} & set(path.parts)
        }
        assert files <= names, sorted(files - names)
    assert not {name for name in names if name.startswith("tests/")}
    assert "kernels/__init__.py" not in names
