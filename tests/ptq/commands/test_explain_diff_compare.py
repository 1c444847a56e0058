"""What explains and compares: recipes step by step, two recipes, two checkpoints, several runs."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from formats.checkpoint.read import Checkpoint
from formats.errors import CheckpointError
from ptq.commands import compare, diff, explain
from ptq.commands.diff import diff_checkpoints
from tests.refusals import refused_request

RECIPES = Path(__file__).resolve().parents[3] / "recipes"


def test_explain_tells_every_step(capsys):
    assert explain.main([str(RECIPES / "a8w8c8.yaml"), "--module", "layers.1."]) == 0
    lines = capsys.readouterr().out.splitlines()
    start = lines.index("model.layers.1.mlp.up_proj  768 x 256")
    assert lines[start + 1 : start + 7] == [
        "  1. smoothquant: its columns take factors that "
        "model.layers.1.post_attention_layernorm is divided by",
        "  2. smoothquant: its rows are divided by factors that down_proj takes",
        "  3. smoothquant: inputs go by token where a static scale costs 1.25 times their error",
        "  4. rtn: rounded to the nearest, scales by absmax",
        "  5. input scale by absmax of what it sees, shared by model.layers.1.mlp.gate_up_proj",
        "  6. stored as int8 weights per_channel, static int8 inputs per_tensor",
    ]
    assert lines[-1] == "  1. K (after RoPE) and V: int8 per_head, static scales by absmax"
    assert all(".1." in line for line in lines if not line.startswith(" "))


def test_explain_tells_what_stays(capsys):
    arguments = [str(RECIPES / "w4_best.yaml"), "--set", "ignore=['re:.*down_proj']"]
    assert explain.main([*arguments, "--module", "layers.0.mlp"]) == 0
    text = capsys.readouterr().out
    assert "stays as it is: ignored by 're:.*down_proj'" in text
    assert "gptq: solved column by column" in text
    assert "refine: roundings and scales moved by 100 steps of its block" in text
    assert "stored as int4 weights group of 128" in text
    assert "cache" not in text
    refused_request("matches none", explain.main, [*arguments, "--module", "nowhere"])


def test_diff_of_recipes(capsys):
    a, b = str(RECIPES / "w4_gptq.yaml"), str(RECIPES / "a8w4.yaml")
    assert diff.main([a, a]) == 0
    assert capsys.readouterr().out == "no difference\n"
    assert diff.main([a, b]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "scheme.activations.granularity: absent -> 'per_token'" in lines
    assert not any("weights" in line for line in lines)
    assert diff.main([str(RECIPES / "w4_rtn.yaml"), str(RECIPES / "c8.yaml")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "scheme.kv_cache.dtype: absent -> 'int8'" in lines
    assert not [line for line in lines if "None" in line or "absent -> absent" in line]
    assert not {"scheme.kv_cache", "scheme.weights"} & {line.split(":")[0] for line in lines}
    refused_request(r"recipes is a folder and .*\.yaml is not", diff.main, [a, str(RECIPES)])


def test_diff_of_checkpoints(tiny_llama, make_quantized, tmp_path, capsys):
    first = make_quantized(tiny_llama, "a8w8")
    assert diff.main([str(first), str(first)]) == 0
    second = tmp_path / "second"
    second.mkdir()
    for path in first.iterdir():
        if path.is_file() and path.name != "model.safetensors":
            (second / path.name).write_bytes(path.read_bytes())
    tensors = load_file(first / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][0, :4] += 1
    tensors["model.layers.0.mlp.down_proj.weight_scale"][3] *= 2
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float()
    save_file(tensors, second / "model.safetensors", metadata={"format": "pt"})
    capsys.readouterr()
    assert diff.main([str(first), str(second)]) == 1
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "tensors that differ (2)",
        "model.norm.weight: bfloat16 [128] -> float32 [128]",
        "model.layers.1.mlp.up_proj.weight: 0.01% of its values differ",
        "scales that differ (1)",
        "model.layers.0.mlp.down_proj.weight_scale: x 1 to 2",
    ]
    other = Checkpoint.open(make_quantized(tiny_llama, "w4"))
    lines = diff_checkpoints(Checkpoint.open(first), other, top=2)
    assert "scheme.weights.dtype: 'int8' -> 'int4'" in lines
    assert any(line.startswith("only in the first (28)") for line in lines)


def test_compare_refuses_what_is_no_report(tmp_path):
    with pytest.raises(
        CheckpointError, match=r"found no quantization\.json; give the output folder"
    ):
        compare.main([str(tmp_path)])
    (tmp_path / "x" / "report").mkdir(parents=True)
    (tmp_path / "x" / "report" / "report.json").write_text(json.dumps({"title": "x"}))
    refused_request("not a readable report", compare.main, [str(tmp_path / "x")])
