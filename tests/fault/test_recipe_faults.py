"""Every fault of a recipe is told with its place, its key and the way out; all of them at once."""

from pathlib import Path

import pytest

from formats.errors import RecipeError
from ptq.recipe.reading import load_recipe

GOOD = """\
model: {path: .}
dataset: {name: stdlib}
scheme: a8w8c8
methods: [smoothquant, rtn]
output: {path: out}
report:
  thresholds: {kl: 0.01}
"""


def faults(folder: Path, text: str | bytes, *overrides: str) -> list[str]:
    """Lines of the error, the file's folder taken off."""
    path = folder / "r.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides)
    lines = str(caught.value).replace(f"{folder}/", "").splitlines()
    return [line.strip() for line in lines if "problems with" not in line]


def test_the_good_recipe_is_good(tmp_path):
    (tmp_path / "r.yaml").write_text(GOOD)
    assert load_recipe(tmp_path / "r.yaml").scheme.wac == "a8w8c8"


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("scheme:", "shceme:", ["r.yaml:1: scheme: missing", "r.yaml:3: shceme: unknown key; did you mean 'scheme'?"]),
        ("kl:", "kll:", ["r.yaml:7: report.thresholds.kll: unknown key; did you mean 'kl'?"]),
        ("stdlib}", "stdlib, calibration: {sample: 3}}", ["r.yaml:2: dataset.calibration.sample: unknown key; did you mean 'samples'?"]),
        ("scheme: a8w8c8", "scheme: w8a8c8", ["r.yaml:3: scheme: unknown scheme 'w8a8c8'; did you mean 'a8w8c8'?"]),
        ("scheme: a8w8c8", "scheme: W8A8", ["r.yaml:3: scheme: unknown scheme 'W8A8'; did you mean 'a8w8'? allowed: w8, w4,"]),
        ("scheme: a8w8c8", "scheme: W4A16", ["r.yaml:3: scheme: unknown scheme 'W4A16'; did you mean 'w4'? allowed: w8, w4,"]),
        ("smoothquant,", "smothquant,", ["r.yaml:4: methods.0: unknown method 'smothquant'; did you mean 'smoothquant'?"]),
        ("smoothquant,", "{smoothquant: {alhpa: 1}},", ["r.yaml:4: methods.0.smoothquant.alhpa: unknown key; did you mean 'alpha'?"]),
        ("smoothquant,", "{smoothquant: {alpha: best}},", ["r.yaml:4: methods.0.smoothquant.alpha: found the text 'best'; needed is 'search' or a number"]),
        ("smoothquant,", "{smoothquant: {alpha: 1.5}},", ["r.yaml:4: methods.0.smoothquant.alpha: found 1.5; needed is 'search' or a number of at most 1"]),
        ("smoothquant,", "{smoothquant: {targets: [mlp_out]}},", ["r.yaml:4: methods.0.smoothquant.targets.0: found the text 'mlp_out'; needed is 'attention_input', 'attention_output', 'mlp_input' or 'mlp_output'; did you mean 'mlp_output'?"]),
        ("smoothquant,", "{smoothquant: 0.5},", ["r.yaml:4: methods.0: found 0.5; needed are options of smoothquant as a mapping"]),
        ("smoothquant,", "{smoothquant: {name: rtn}},", ["r.yaml:4: methods.0: unknown key 'name' in the options of smoothquant"]),
        ("[smoothquant, rtn]", "[smoothquant]", ["r.yaml:4: methods: found smoothquant; the scheme a8w8c8 quantizes weights"]),
        ("[smoothquant, rtn]", "[rtn, rtn]", ["r.yaml:4: methods: found rtn, rtn; give each method once"]),
        ("[smoothquant, rtn]", "rtn", ["r.yaml:4: methods: found the text 'rtn'; needed is a list"]),
        ("methods: [smoothquant, rtn]\n", "", ["r.yaml:1: methods: found none; the scheme a8w8c8 quantizes weights"]),
        ("scheme: a8w8c8", "scheme: c8", ["r.yaml:4: methods: found smoothquant, rtn, but the scheme c8 leaves weights"]),
        ("scheme: a8w8c8", "scheme: {}", ["r.yaml:3: scheme: quantizes nothing"]),
        ("scheme: a8w8c8", "scheme: {activations: {}}", ["r.yaml:3: scheme: activations are quantized but weights are not"]),
        ("scheme: a8w8c8", "scheme: {kv_cache: {dtype: int2}}\nignore: []", ["r.yaml:3: scheme.kv_cache.dtype: found the text 'int2'; needed is 'int8'"]),
        ("kl: 0.01", "kl: low", ["r.yaml:7: report.thresholds.kl: found the text 'low'; needed is a number"]),
        ("kl: 0.01", "kl: '0.01'", ["r.yaml:7: report.thresholds.kl: found the text '0.01'; needed is a number"]),
        ("kl: 0.01", "kl: -1e-2", ["r.yaml:7: report.thresholds.kl: found -0.01; needed is a number above 0"]),
        ("kl: 0.01", "kl: .nan", ["r.yaml:7: report.thresholds.kl: found the text '.nan'; needed is a number"]),
        ("kl: 0.01", "kl: 1e999", ["r.yaml:7: report.thresholds.kl: found inf; needed is a finite number"]),
        ("kl: 0.01}", "kl: 0.01}\n  peers: [bitsandbytes-int4]", ["r.yaml:8: report.peers.0.name: unknown peer 'bitsandbytes-int4'; did you mean 'bitsandbytes-int8'? allowed: bitsandbytes-int8, bitsandbytes-nf4,"]),
        ("kl: 0.01}", "kl: 0.01}\n  peers: [autoround, {name: autoround}]", ["r.yaml:8: report.peers: found autoround, autoround; give each peer once"]),
        ("kl: 0.01}", "kl: 0.01}\n  peers: autoround", ["r.yaml:8: report.peers: found the text 'autoround'; needed is a list"]),
        ("kl: 0.01}", "kl: 0.01}\n  peers: [{name: autoround, pyhton: a}]", ["r.yaml:8: report.peers.0.pyhton: unknown key; did you mean 'python'? allowed: name, python, timeout"]),
        ("kl: 0.01}", "kl: 0.01}\n  peers: [{name: autoround, timeout: 0}]", ["r.yaml:8: report.peers.0.timeout: found 0; needed is a number above 0"]),
        ("kl: 0.01}", "kl: 0.01}\n  peers: [{python: a}]", ["r.yaml:8: report.peers.0.name: missing; this key is needed"]),
        ("stdlib}", "stdlib, pack: yes}", ["r.yaml:2: dataset.pack: found the text 'yes'; needed is true or false"]),
        ("stdlib}", "stdlib, calibration: {samples: 2.5}}", ["r.yaml:2: dataset.calibration.samples: found 2.5; needed is a whole number"]),
        ("stdlib}", "stdlib, calibration: {samples: true}}", ["r.yaml:2: dataset.calibration.samples: found true; needed is a whole number"]),
        ("{path: out}", "out", ["r.yaml:5: output: found the text 'out'; needed is a mapping of path"]),
        ("{path: out}", "", ["r.yaml:5: output: found nothing (null); needed is a mapping of path"]),
        ("path: .", "path: nowhere", ["r.yaml:1: model.path: no such folder: nowhere. Paths in a recipe are relative to its own folder"]),
        ("scheme: a8w8c8", "scheme: a8w8c8\nscheme: a8w8", ["r.yaml:4: scheme: duplicate key; line 3 has it already"]),
        ("kl: 0.01", "kl: 0.01, kl: 1", ["r.yaml:7: report.thresholds.kl: duplicate key; line 7 has it already"]),
        ("report:", "ignore: ['re:*x']\nreport:", ["r.yaml:6: ignore.0: 're:*x' is not a regular expression"]),
        ("report:", "ignore: lm_head\nreport:", ["r.yaml:6: ignore: found the text 'lm_head'; needed is a list"]),
        ("scheme: a8w8c8", "scheme: !!python/name:os.system a", ["r.yaml:3: scheme: tag !!python/name:os.system is not allowed"]),
        ("kl: 0.01", "kl: !!int x", ["r.yaml:7: report.thresholds.kl: 'x' is not a value of tag !!int"]),
        ("report:", "1: 2\nreport:", ["r.yaml:6: key 1 is not text"]),
        ("report:", "ignore: &a [*a]\nreport:", ["r.yaml:6: ignore.0: an anchor contains an alias of itself"]),
    ],
)  # fmt: skip
def test_one_fault_is_told_with_line_key_and_way_out(tmp_path, old, new, expected):
    assert GOOD.count(old) == 1
    found = faults(tmp_path, GOOD.replace(old, new))
    assert len(found) == len(expected), found
    for line, start in zip(found, expected, strict=True):
        assert line.startswith(start)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model: [a\n", "r.yaml:2: not valid YAML: while parsing a flow sequence"),
        (
            "a: 1\n\tb: 2\n",
            "r.yaml:2: not valid YAML: while scanning for the next token found character '\\t' that cannot start any token; indent with spaces",
        ),
        ("a: *b\n", "r.yaml:1: not valid YAML: found undefined alias 'b'"),
        ("a: 1\n---\nb: 2\n", "r.yaml:2: not valid YAML: expected a single document"),
        ("a: 1\nb: \x07\n", "r.yaml:2: not valid YAML: special characters are not allowed"),
        ("", "r.yaml:1: found no keys; a recipe needs model, scheme and output"),
        ("- a\n", "r.yaml:1: found no keys"),
        (
            "dataset:\n  name:stdlib\n  column: a\n",
            "r.yaml:3: not valid YAML: mapping values are not allowed here; a key needs a space after its colon",
        ),
        (
            'model: {path: "a}\nscheme: w8\n',
            "r.yaml:1: not valid YAML: while scanning a quoted scalar found unexpected end of stream; the quote that opens here is not closed",
        ),
        ("[" * 5000, "r.yaml:1: not a recipe: nested too deeply"),
        (b"a: \xff\n", "r.yaml:1: not UTF-8 text (byte 3)"),
    ],
)
def test_text_that_is_no_recipe(tmp_path, text, expected):
    (found,) = faults(tmp_path, text)
    assert found.startswith(expected)


def test_all_faults_at_once_in_the_order_of_lines(tmp_path):
    text = GOOD.replace("scheme: a8w8c8", "shceme: a8w8c8\noutptu: 1").replace("0.01", "low")
    found = faults(tmp_path, text.replace("stdlib", "3"), "dataset.seed=1", "methods.0=rnt")
    assert [line.split(": ")[:2] for line in found] == [
        ["r.yaml:1", "scheme"],
        ["r.yaml:2", "dataset.name"],
        ["r.yaml:3", "shceme"],
        ["r.yaml:4", "outptu"],
        ["r.yaml:8", "report.thresholds.kl"],
        ["--set methods.0=rnt", "unknown method 'rnt'; did you mean 'rtn'? allowed"],
        ["--set dataset.seed=1", "unknown key; allowed"],
    ]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("report.treshold.kl=1", "--set report.treshold.kl=1: report.treshold: unknown key; did you mean 'thresholds'?"),
        ("scheme.weights.granularity=per_chanel", "--set scheme.weights.granularity=per_chanel: found the text 'per_chanel'; needed is 'per_tensor', 'per_channel', 'group' or 'block'"),
        ("methods.5.rtn=1", "--set methods.5.rtn=1: methods.5: no such item"),
        ("methods.2=rtn", "--set methods.2=rtn: no such item; needed is an index from 0 to 1"),
        ("model.path.x=1", "--set model.path.x=1: model.path: holds '.', not a mapping"),
        ("model.path=/nowhere", "--set model.path=/nowhere: no such folder: /nowhere. Paths that are typed are relative to the current directory"),
        ("kl", "--set kl: found no key=value; write --set key.key=value"),
        ("=3", "--set =3: found no key=value"),
        ("output.path=[a", "--set output.path=[a: not valid YAML"),
    ],
)  # fmt: skip
def test_faults_of_overrides(tmp_path, override, expected):
    (found,) = faults(tmp_path, GOOD, override)
    assert found.startswith(expected)


def test_aliases_that_multiply_each_other_stop(tmp_path):
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    found = faults(tmp_path, GOOD + "\n".join(lines))
    assert sum("more than 10000 values" in line for line in found) == 1


def test_an_override_that_misspells_a_method_is_told_what_it_made():
    with pytest.raises(RecipeError, match=r"'smoothquant' and 'smothquant'; .*did you mean 'smo"):
        load_recipe("a8w8c8", ["methods.0.smothquant.alpha=1"])
