"""Experts in 3-D parameters are read as if each had its own layers, and no more than is asked for."""

import pytest
import torch

from formats.checkpoint.read import Checkpoint
from formats.checkpoint.split import RowsOf
from formats.errors import CheckpointError
from tests.experts import MOE, stack_experts
from tests.ptq.quantizing import edit_model


@pytest.mark.parametrize("family", MOE)
def test_both_kinds_of_checkpoint_hold_the_same_tensors(make_model, tmp_path, family):
    source = make_model(family, **MOE[family])
    stacked = Checkpoint.open(stack_experts(source, tmp_path / "stacked", family))
    apart = Checkpoint.open(source)
    assert stacked.names() == apart.names()
    assert sum(".experts." in name for name in apart.names()) >= 4 * 3
    for name in apart.names():
        assert (stacked.dtype(name), stacked.shape(name)) == (apart.dtype(name), apart.shape(name))
        assert torch.equal(stacked.tensor(name), apart.tensor(name)), name


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


def flatten(tensors: dict[str, torch.Tensor]) -> None:
    name = "model.layers.0.mlp.experts.gate_up_proj"
    tensors[name] = tensors[name].flatten(0, 1)


def odd_rows(tensors: dict[str, torch.Tensor]) -> None:
    name = "model.layers.0.mlp.experts.gate_up_proj"
    tensors[name] = tensors[name][:, :-1].contiguous()


def add_an_expert(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.mlp.experts.2.down_proj.weight"] = torch.zeros(128, 128)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (flatten, r"gate_up_proj has shape \[2048, 128\]; needed is \[E, 2 I, H\]"),
        (odd_rows, r"gate_up_proj has shape \[8, 255, 128\]"),
        (add_an_expert, r"holds both .*experts\.down_proj and .*experts\.2\.down_proj"),
    ],
)
def test_what_does_not_fit_is_refused(make_model, tmp_path, change, words):
    source = make_model("qwen3_moe", **MOE["qwen3_moe"])
    stacked = stack_experts(source, tmp_path / "stacked", "qwen3_moe")
    with pytest.raises(CheckpointError, match=words):
        Checkpoint.open(edit_model(stacked, tmp_path / "changed", change))
