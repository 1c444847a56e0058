"""The training script of the default model: its sieves, a tiny run, and the model it shipped."""

import json
import os
import subprocess
import sys
import sysconfig
from importlib.metadata import Distribution
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from formats.errors import RecipeError
from recipes import run_all
from recipes.tiny_python_card import mean_loss, stdlib_text, windows, write_card
from recipes.tiny_python_corpus import (
    build_corpus,
    find_sources,
    is_code,
    permissive_licence,
    without_notice,
)
from recipes.train_tiny_python import parse_args, read_config, train

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ROOT / "recipes" / "tiny-python"


def code(name: str, functions: int = 30) -> str:
    """Python source of no use, different for every name."""
    body = "".join(
        f"def {name}_{'abcdefghijklmnopqrstuvwxyzABCDEF'[i]}():\n    return {name}.x\n\n\n"
        for i in range(functions)
    )
    return f'"""Module {name}."""\n\n{body}'


def add_distribution(site: Path, name: str, licence: str, files: dict[str, str]) -> Distribution:
    """Lay out an installed distribution with the given metadata lines and files."""
    info = site / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.4\nName: {name}\nVersion: 1.0\n{licence}\n"
    )
    for path, text in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)
    (info / "RECORD").write_text("".join(f"{path},,\n" for path in files))
    return Distribution.at(info)


@pytest.mark.parametrize(
    ("metadata", "accepted"),
    [
        ("License-Expression: MIT", True),
        ("License-Expression: BSD-3-Clause AND 0BSD AND MIT AND Zlib AND CC0-1.0", True),
        ("License-Expression: Apache-2.0 WITH LLVM-exception", True),
        ("License: Apache License, Version 2.0", True),
        ("License: 3-Clause BSD License", True),
        ("Classifier: License :: OSI Approved :: ISC License (ISCL)", True),
        ("License: MIT\nClassifier: License :: OSI Approved :: GNU General Public License", False),
        ("License-Expression: MPL-2.0 AND MIT", False),
        ("License-Expression: CC-BY-NC-4.0", False),
        ("License-Expression: Apache-2.0 AND CNRI-Python", False),
        ("License: NVIDIA Proprietary Software", False),
        ("License: LGPL", False),
        ("Summary: names no licence", False),
    ],
)
def test_only_permissive_licences_pass(tmp_path, metadata, accepted):
    assert (
        permissive_licence(add_distribution(tmp_path, "some", metadata, {})) is not None
    ) == accepted


def test_sources_leave_out_vendored_code_backports_and_other_licences(tmp_path):
    mit = "License-Expression: MIT"
    add_distribution(
        tmp_path, "good", mit, {"good/a.py": "", "good/_vendor/b.py": "", "good/c.so": ""}
    )
    add_distribution(tmp_path, "typing_extensions", mit, {"typing_extensions.py": ""})
    add_distribution(tmp_path, "closed", "License: Proprietary", {"closed.py": ""})
    sources, shares = find_sources([tmp_path])
    assert [source.name for source in sources] == ["good/a.py"]
    assert list(shares) == ["good"]


def test_corpus_has_no_standard_library_no_repeats_and_no_foreign_files(tmp_path):
    stdlib = Path(sysconfig.get_path("stdlib"))
    argparse = (stdlib / "argparse.py").read_text()
    files = {
        "good/own.py": code("own"),
        "good/again.py": "# a comment more\n" + code("own"),
        "good/copied.py": argparse.replace("    ", "\t"),
        "good/partly.py": code("partly") + "\n".join(argparse.splitlines()[100:200]),
        "good/gpl.py": "# GNU General Public License\n" + code("gpl"),
        "good/table.py": "X = [" + "1234567, " * 30 + "]\n",
    }
    add_distribution(tmp_path, "good", "License-Expression: MIT", files)
    corpus = build_corpus([tmp_path], 1_000_000, 2)
    assert corpus.stdlib_copies == 2
    assert len(corpus.train) == 1
    assert code("own") in corpus.train[0]
    assert [source["files"] for source in corpus.sources()] == [1]


def test_nothing_to_train_on_is_an_error(tmp_path):
    with pytest.raises(RecipeError, match="no permissively licensed"):
        build_corpus([tmp_path], 1_000_000, 1)


def test_tables_stubs_and_minified_files_are_no_code():
    assert is_code(code("fine"))
    assert not is_code("x = 1\n")
    assert not is_code(code("long") + "y = '" + "a" * 600 + "'\n")


def test_only_a_copyright_notice_is_cut():
    assert without_notice("# Copyright 2020\n#\n# words\n\nimport os\n") == "import os\n"
    assert without_notice("# what this is\nimport os\n") == "# what this is\nimport os\n"


@pytest.mark.ci  # trains a tokenizer and a model
def test_a_tiny_run_writes_a_model_that_transformers_runs(tmp_path):
    site, out = tmp_path / "site", tmp_path / "model"
    files = {
        f"good/m{i}.py": code(f"name{'abcdefghij'[i % 10] * (1 + i // 10)}") for i in range(60)
    }
    add_distribution(site, "good", "License-Expression: MIT", files)
    options = "--steps 2 --limit-mb 1 --batch-tokens 1024 --check-windows 1 --device cpu".split()
    command = [sys.executable, "-m", "recipes.train_tiny_python", "--out", str(out), *options]
    subprocess.run(
        [*command, "--site-packages", str(site)],
        cwd=ROOT,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "2"},
        capture_output=True,
    )
    record = json.loads((out / "training.json").read_text())
    assert record["steps"] == 2
    assert record["sources"][0]["licence"] == "MIT"
    assert "good | 1.0 | MIT" in (out / "README.md").read_text()
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(out)
    prompt = tokenizer("def name", return_tensors="pt")
    made = model.generate(**prompt, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    assert made.shape[1] == prompt["input_ids"].shape[1] + 3


def test_a_model_of_another_family_is_trained_from_its_config():
    options = "--out x --steps 1 --batch-tokens 1024 --device cpu --config".split()
    args = parse_args([*options, str(SHIPPED.parent / "tiny-python-gemma3.json")])
    config = read_config(args.config)
    config.num_hidden_layers, config.layer_types = 1, ["sliding_attention"]
    ids = torch.randint(4096, (2000,), dtype=torch.int16)
    model, result = train(ids, config, args, torch.device("cpu"))
    assert model.config.model_type == "gemma3_text"
    assert model.dtype == torch.float32
    assert 8 < result.loss < 9


def test_a_config_that_does_not_fit_the_tokenizer_is_refused(tmp_path):
    config = json.loads((SHIPPED / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 512}))
    with pytest.raises(RecipeError, match="512 tokens"):
        read_config(tmp_path / "config.json")
    with pytest.raises(RecipeError, match="no config"):
        read_config(tmp_path / "none.json")


def test_the_shipped_card_is_that_of_its_record(tmp_path):
    for name in ("config.json", "training.json"):
        (tmp_path / "tiny-python").mkdir(exist_ok=True)
        (tmp_path / "tiny-python" / name).write_text((SHIPPED / name).read_text())
    record = json.loads((SHIPPED / "training.json").read_text())
    write_card(tmp_path / "tiny-python", record)
    made = (tmp_path / "tiny-python" / "README.md").read_text()
    assert made.replace(str(tmp_path), "recipes") == (SHIPPED / "README.md").read_text()


def test_recipes_that_cannot_run_are_told_with_the_reason(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    arguments = [str(tmp_path), "--output", str(tmp_path / "out"), "--recipes", "w8_rtn"]
    assert run_all.main(arguments) == 2
    assert "FAILED: w8_rtn: error" in (told := capsys.readouterr().out)
    assert "is this a model folder?" in told  # it holds no weights
    assert "is this a model folder?" in (tmp_path / "out" / "w8_rtn.log").read_text()
    with pytest.raises(RecipeError, match="w4_rtn"):
        run_all.main([*arguments[:-1], "w4_rtm"])


def test_shipped_model_is_what_its_record_says():
    record = json.loads((SHIPPED / "training.json").read_text())
    assert sum(file.stat().st_size for file in SHIPPED.iterdir()) < 16_000_000
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED)
    model = AutoModelForCausalLM.from_pretrained(SHIPPED, dtype=torch.float32)
    rows = windows(tokenizer, stdlib_text(["textwrap", "heapq"]), 512)[:8]
    loss = mean_loss(model, rows)
    assert record["parameters"] == model.num_parameters()
    assert loss < 2.3  # an untrained model has ln 4096 = 8.3


@pytest.mark.parametrize(
    "text", ["", "\t x \r\n\n  é漢字🙂\x00", "a  b <|endoftext|> 'self'  ", "\ufeff\u2028 \u00a0"]
)
def test_shipped_tokenizer_is_lossless(text):
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED)
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
