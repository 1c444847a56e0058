"""Declarations are found by being there, are data, and are what everybody else asks."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from formats.errors import CheckpointError
from formats.families import registry
from formats.families.registry import FAMILIES, MODEL_TYPES, family_of, find_family, unsupported
from formats.families.sizes import Heads, heads_of

ROOT = Path(__file__).resolve().parents[3]
DECLARED = ROOT / "formats" / "families" / "declared"
ROOMS = ("calibrate", "formats", "inference", "kernels", "ptq")
# Run in the interpreters of other software, where nothing of ours is imported.
FOREIGN = ROOT / "inference" / "bench" / "peers" / "adapters"


def test_every_file_declares_a_family_of_its_own():
    files = [path for path in DECLARED.glob("*.py") if path.stem != "__init__"]
    assert len(files) == len(FAMILIES)
    assert len(set(MODEL_TYPES)) == sum(len(family.model_types) for family in FAMILIES)


def test_a_declaration_is_read_without_torch_or_transformers():
    code = (
        "import sys, formats.families.groups, formats.families.groups\n"
        "print(*{'torch', 'transformers'} & set(sys.modules))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert run.stdout.split() == []


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
    assert find_family({"model_type": "bert"}) is None
    with pytest.raises(CheckpointError, match=r"model_type 'bert' is not supported.*llama"):
        family_of({"model_type": "bert"})


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
        if DECLARED in path.parents or FOREIGN in path.parents:
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            where = f"{path.relative_to(ROOT)}:{number}"
            assert not asks.search(line), f"{where} asks for a model_type; read the declaration"
            shape = line.strip().startswith('"model_type": ')  # of a random checkpoint
            assert shape or not kinds.search(line), f"{where} names a family"
