"""Experts in 3-D parameters are read as if each had its own layers, and no more than is asked for."""

import pytest
import torch

from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError
from formats.stored.safetensors_files import RowsOf
from tests.experts import MOE, stack_experts
from tests.ptq.quantizing import edit_model
from tests.published import check_tensors


@pytest.mark.parametrize("family", MOE)
def test_both_kinds_of_checkpoint_hold_the_same_tensors(make_model, tmp_path, family):
    source = make_model(family, **MOE[family])
    assert sum(".experts." in name for name in Checkpoint.open(source).names()) >= 4 * 3
    check_tensors(stack_experts(source, tmp_path / "stacked", family), source)


def test_only_the_rows_of_a_layer_are_read(make_model, tmp_path, monkeypatch):
    source = make_model("qwen3_moe", **MOE["qwen3_moe"])
    checkpoint = Checkpoint.open(stack_experts(source, tmp_path / "stacked", "qwen3_moe"))
    span, sizes = RowsOf.span, []

    def counted(self, name):
        start, end = span(self, name)
        sizes.append(end - start)
        return start, end

    monkeypatch.setattr(RowsOf, "span", counted)
    checkpoint.tensor("model.layers.0.mlp.experts.5.up_proj.weight")
    assert sizes == [128 * 128 * 2]


@pytest.mark.parametrize(
    ("leaf", "change", "words"),
    [
        (
            "gate_up_proj",
            lambda both: both.flatten(0, 1),
            r"gate_up_proj has shape \[2048, 128\]; needed is \[E, 2 I, H\]",
        ),
        ("gate_up_proj", lambda both: both[:, :-1], r"gate_up_proj has shape \[8, 255, 128\]"),
        (
            "2.down_proj.weight",
            lambda _: torch.zeros(128, 128),
            r"holds both .*experts\.down_proj and .*experts\.2\.down_proj",
        ),
    ],
)
def test_what_does_not_fit_is_refused(make_model, tmp_path, leaf, change, words):
    source = make_model("qwen3_moe", **MOE["qwen3_moe"])
    stacked = stack_experts(source, tmp_path / "stacked", "qwen3_moe")
    name = f"model.layers.0.mlp.experts.{leaf}"
    edit = lambda tensors: tensors.update({name: change(tensors.get(name))})  # noqa: E731
    with pytest.raises(CheckpointError, match=words):
        Checkpoint.open(edit_model(stacked, tmp_path / "changed", edit))
