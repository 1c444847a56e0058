"""Declarations are found by being there, are data, and are what everybody else asks; what names tell."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from formats.errors import CheckpointError
from formats.families import registry
from formats.families.block_layers import (
    any_expert,
    block_of,
    by_block,
    expert_of,
    is_projection,
    is_router,
    is_shared_expert,
    split_name,
)
from formats.families.family import Attention, Family
from formats.families.registry import BY_TYPE, FAMILIES, MODEL_TYPES, unsupported
from formats.families.sizes import Heads, heads_of, turning_pairs
from ptq.commands.families import main
from tests.families_table import OTHERS, measured_row, write_tiny

ROOT = Path(__file__).resolve().parents[3]
DECLARED = ROOT / "formats" / "families" / "declared"
ROOMS = ("calibrate", "formats", "inference", "kernels", "ptq")
# Run in the interpreters of other software, where nothing of ours is imported.
FOREIGN = ROOT / "inference" / "bench" / "peers" / "adapters"
GGUF = ROOT / "formats" / "gguf"  # which tells llama.cpp's names of architectures and tokenizers


def test_every_file_declares_a_family_of_its_own():
    files = [path for path in DECLARED.glob("*.py") if path.stem != "__init__"]
    assert len(files) == len(FAMILIES)
    assert len(set(MODEL_TYPES)) == sum(len(family.model_types) for family in FAMILIES)


@pytest.mark.parametrize(
    "reading",
    [
        "import formats.families.block_layers",
        "import ptq.commands.families as shown; shown.main([])",
    ],
)
def test_declarations_are_read_and_shown_without_torch_or_transformers(reading):
    code = f"import sys; {reading}; print({{'torch', 'transformers'}} & set(sys.modules))"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert run.stdout.splitlines()[-1] == "set()"


def test_a_family_of_transformers_is_no_typing_error():
    ours = ", ".join(MODEL_TYPES)
    for found in ("llama4", "cohere2", "qwen3_next"):
        told = unsupported({"model_type": found}, "folder")
        assert told.startswith(
            f"model_type {found!r} of folder is not supported yet. transformers knows it; "
            f"this project runs {ours}"
        )
    told = unsupported({"model_type": "qwen33"})
    assert "not supported; did you mean 'qwen3'? allowed: " + ours in told
    assert unsupported({}, "x").startswith(f"found no model_type of x; supported are {ours}")


def test_every_family_of_transformers_is_found_in_its_source():
    assert all(map(registry._known_to_transformers, sorted(CONFIG_MAPPING_NAMES)[::40]))


def test_what_is_not_declared_is_refused_by_name():
    assert registry.find_family({"model_type": "bert"}) is None
    with pytest.raises(CheckpointError, match=r"model_type 'bert' is not supported.*llama"):
        registry.family_of({"model_type": "bert"})


def test_sizes_of_heads_follow_from_what_a_config_says():
    config = {"num_attention_heads": 4, "hidden_size": 64}
    assert heads_of(config) == Heads(query=4, kv=4, size=16)
    assert heads_of(config | {"num_key_value_heads": 2, "head_dim": 8}) == Heads(4, 2, 8)
    assert heads_of(config | {"num_key_value_heads": None, "head_dim": None}) == Heads(4, 4, 16)


@pytest.mark.parametrize("room", ROOMS)
def test_nobody_else_asks_which_family_a_model_is(room):
    """No comparison with a model_type, and no family's own names, outside of the declarations."""
    asks = re.compile(r"model_type\S*\s*(==|!=|in\b|not in\b)|(==|!=)\s*[\w.\[]*model_type")
    kinds = re.compile("|".join(rf"[\"']{kind}[\"']" for kind in MODEL_TYPES))
    for path in (ROOT / room).rglob("*.py"):
        if {DECLARED, FOREIGN, GGUF} & set(path.parents):
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            where = f"{path.relative_to(ROOT)}:{number}"
            assert not asks.search(line), f"{where} asks for a model_type; read the declaration"
            shape = line.strip().startswith('"model_type": ')  # of a random checkpoint
            assert shape or not kinds.search(line), f"{where} names a family"


def test_names_tell_projections_from_routers():
    block = "model.layers.3"
    for name in ("block_sparse_moe.experts.7.w2", "mlp.experts.11.up_proj", "mlp.gate_proj"):
        assert is_projection(f"{block}.{name}")
        assert not is_router(f"{block}.{name}")
    for name in ("block_sparse_moe.gate", "mlp.gate", "mlp.shared_expert_gate"):
        assert is_router(f"{block}.{name}")
        assert not is_projection(f"{block}.{name}")


def test_names_tell_block_and_expert():
    name = "model.layers.12.mlp.experts.7.up_proj"
    assert (block_of(name), expert_of(name)) == ("model.layers.12", 7)
    assert split_name(name) == ("12", "mlp.experts.7", "up_proj")
    assert split_name("model.layers.3.input_layernorm") == ("3", "", "input_layernorm")
    assert any_expert(name) == "model.layers.12.mlp.experts.*.up_proj"
    assert (block_of("lm_head.weight"), split_name("lm_head")) == (None, None)
    shared = "model.layers.0.mlp.shared_expert.up_proj"
    assert (expert_of(shared), is_shared_expert(shared)) == (None, True)
    assert by_block([name, "lm_head"]) == {"model.layers.12": [name], "": ["lm_head"]}


CONFIG = {"num_attention_heads": 2, "hidden_size": 12, "layers": [1, 0]}


@pytest.mark.parametrize(
    ("kind", "part", "found"),
    [
        ("halves", 1.0, (0, 1, 2, 0, 1, 2)),
        ("halves", 2 / 3, (0, 1, 0, 1, 2, 3)),
        ("interleaved", 1.0, (0, 0, 1, 1, 2, 2)),
        ("interleaved", 2 / 3, (0, 0, 1, 1, 2, 3)),
    ],
)
def test_pairs_are_those_that_turn(kind, part, found):
    attention = Attention(rotary_pairs=kind, unrotated_setting="layers")
    family = Family(model_types=("x",), attention=attention, partial_rotary=True)
    config = CONFIG | {"partial_rotary_factor": part}
    assert turning_pairs(family, config, 0) == found
    assert turning_pairs(family, config, 1) == (0, 1, 2, 3, 4, 5)
    assert turning_pairs(family, {**config, "layers": None}, 1) == found


ROWS = {row["family"]: row for row in registry.read_table()}
AGAIN = "write the table again: python -m tests.families_table"


def test_every_declared_type_has_its_row():
    assert list(ROWS) == [*sorted(BY_TYPE), OTHERS["family"]], AGAIN
    document = registry.DOCUMENT.read_text(encoding="utf-8")
    assert registry.with_table(registry.read_table()) == document


@pytest.mark.parametrize("kind", sorted(BY_TYPE))
def test_a_row_is_what_a_model_shows(tmp_path, kind):
    found = measured_row(kind, write_tiny(kind, tmp_path), tmp_path)
    assert found == {column: ROWS[kind][column] for column in found}, AGAIN


def test_a_command_prints_it(capsys):
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == ["family", "smoothing"]
    assert [line.split()[0] for line in lines[1 : len(ROWS)]] == sorted(BY_TYPE)
    assert main(["olmo2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [ROWS["olmo2"]]
    assert main(["gpt2"]) == 0
    assert "No family of the name gpt2 is declared" in capsys.readouterr().out
