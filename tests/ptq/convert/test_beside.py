"""A recipe that asks for a .gguf file: beside the checkpoint, with what `ptq convert` makes of it."""

from pathlib import Path

import pytest

import ptq
from formats.errors import RecipeError
from tests.ptq.quantizing import FEW

pytest.importorskip("gguf", reason="the extra `gguf`")

SMALL = (*FEW, "scheme.weights.group_size=32", "output.format=gguf")


def test_the_file_is_that_of_convert(tmp_path, tiny_llama, monkeypatch):
    from gguf import GGUFReader

    from ptq.convert.convert import convert

    (tmp_path / "text.py").write_text("def add(a, b):\n    return a + b\n" * 40)
    monkeypatch.chdir(tmp_path)
    made = ptq.quantize(
        model=tiny_llama, scheme="w4", data="text.py", overrides=SMALL, progress=False
    )
    found = made.checkpoint.parent / "model.gguf"
    convert(made.checkpoint, Path("again.gguf"), "gguf", progress=False)
    assert found.read_bytes() == Path("again.gguf").read_bytes()
    name = GGUFReader(found).fields["general.name"].contents()
    assert (
        name == made.checkpoint.parent.name
    )  # not `checkpoint`, as the list of a server would say


def test_a_model_that_llama_cpp_has_not_is_refused_before_any_work(tmp_path, make_model):
    with pytest.raises(RecipeError, match=r"output.format.*model_type 'gpt_neox'") as found:
        ptq.quantize(model=make_model("gpt_neox"), scheme="w4", overrides=SMALL, output=tmp_path)
    assert "Keep the compressed-tensors layout" in str(found.value)
