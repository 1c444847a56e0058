"""The door for Python: names that come when asked for, in any order, and quantization from it."""

import subprocess
import sys
from pathlib import Path

import pytest

import ptq
from ptq.convert.convert import convert
from ptq.recipe.reading import load_recipe
from tests.e2e.test_packaging import write_stand_in
from tests.families import but_in_ci
from tests.ptq.quantizing import write_recipe
from tests.refusals import refused_recipe

ROOT = Path(__file__).resolve().parents[2]
FIRST = (
    "import ptq",
    "from ptq import Engine",
    "from inference.engine import Engine",
    "from formats.checkpoint.read import Checkpoint",
    "from calibrate.data import load_tokens",
    "import transformers, torch, ptq",
)


def fresh(code: str, *path: Path) -> str:
    """What code prints in an interpreter of its own."""
    start = f"import sys; sys.path[:0] = {[str(folder) for folder in (*path, ROOT)]!r}\n"
    done = subprocess.run(
        [sys.executable, "-I", "-c", start + code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_is_cheap_and_tells_what_there_is():
    code = f"""
import ptq
assert {{"quantize", "Engine", "SamplingParams", "Checkpoint"}} <= set(dir(ptq))
assert not hasattr(ptq, "Quantize")
assert not {{"torch", "transformers", "pydantic", "kernels"}} & set(sys.modules)
from ptq import Checkpoint, Engine, SamplingParams
Engine.from_pretrained("{ROOT}/recipes/tiny-python")
assert not {{"torch._dynamo", "transformers.activations", "pandas"}} & set(sys.modules)
from transformers.utils.type_validators import ACT2FN
assert "silu" in ACT2FN and "cosine" not in ACT2FN
assert list(ACT2FN) == list(sys.modules["transformers.activations"].ACT2FN)
from ptq import quantize
print(Engine.__module__, quantize.__module__, SamplingParams().max_tokens, Checkpoint.__name__)
"""
    assert fresh(code) == "inference.engine ptq.api 128 Checkpoint\n"
    assert set(ptq._HOMES) == set(ptq.__all__)


@pytest.mark.parametrize("foreign", but_in_ci([False, True], True))
def test_any_room_may_be_imported_first(foreign, tmp_path):
    """Each in a child forked before any but torch's; beside a foreign `kernels`, and without."""
    if foreign:
        write_stand_in(tmp_path, "0.1.0")
    code = f"""
import os, torch
for first in {FIRST!r}:
    child = os.fork()
    if not child:
        exec(first)
        from kernels.ops import quantize_static
        import kernels.cpu.native, kernels
        assert getattr(kernels, "__version__", None) == ({foreign} and "0.1.0" or None)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, first
"""
    fresh(code, tmp_path)


def test_another_package_of_a_rooms_name_is_told(tmp_path):
    (tmp_path / "inference").mkdir()
    (tmp_path / "inference" / "__init__.py").write_text("raise SystemExit('imported')")
    code = """
import ptq
from formats.errors import EngineError
try:
    ptq.Engine
except EngineError as error:
    print(error)
"""
    assert "another project's package of that name" in fresh(code, tmp_path)


def test_a_recipe_is_quantized_from_python(tmp_path, tiny_llama, monkeypatch):
    """Paths may begin with ~, as in a shell."""
    write_recipe(tmp_path, tiny_llama)
    monkeypatch.setenv("HOME", str(tmp_path))
    made = ptq.quantize(
        "~/r.yaml", overrides=["scheme=w4"], output=tmp_path / "file", progress=False
    )
    recipe = load_recipe(tmp_path / "r.yaml", ["scheme=w4"])
    again = ptq.quantize(recipe, output="~/object", progress=False)
    files = [path / "model.safetensors" for path in (made.checkpoint, again.checkpoint)]
    assert files[0].parent == tmp_path / "file" / "checkpoint"
    assert files[0].read_bytes() == files[1].read_bytes()
    convert("~/object/checkpoint", "~/gptq", "gptq")
    convert("~/object/checkpoint", "~/model.gguf", "gguf")
    convert("~/model.gguf", "~/floats", "float")
    assert {"gptq", "floats", "model.gguf"} <= {path.name for path in tmp_path.iterdir()}
    assert ptq.Engine.from_pretrained("~/model.gguf").tokenizer is not None
    assert ptq.Checkpoint.open(made.checkpoint).scheme.wac == "w4"
    engine = ptq.Engine.from_pretrained(made.checkpoint)
    (answer,) = engine.generate(["def f"], ptq.SamplingParams(max_tokens=3))
    assert len(answer.token_ids) <= 3
    refused_recipe("exists already", ptq.quantize, recipe, output=tmp_path / "object")
    refused_recipe(r"give a list: \['scheme=w4'\]", ptq.quantize, "c8", overrides="scheme=w4")
    refused_recipe("a recipe that is no file", ptq.quantize, recipe, overrides=["scheme=w4"])


def test_what_was_given_is_named_as_it_was_given(tmp_path):
    output = tmp_path / "out"
    for name, key, kind in (("model", "model.path", "folder"), ("data", "dataset.name", "file")):
        gone = {"model": "tiny-python", name: tmp_path / "no.txt"}
        message = rf"^{name} \S+/no.txt: {key}: no such {kind}"
        refused_recipe(message, ptq.quantize, "c8", output=output, **gone)
