"""`--adapter NAME=FOLDER` of the commands: what runs with it, and what is refused."""

import io
import shutil
from pathlib import Path

import pytest

from formats.command import run_command
from inference import chat, predict
from inference.beam_search import BeamParams, beam_search
from inference.bench import command as bench
from inference.bench.load import Load, ask
from inference.engine import Engine
from inference.requests.request import SamplingParams
from inference.server import command as serve
from tests.adapters import write_adapter
from tests.inference.predicting import SHORT, answered

NAMES = (None, "sql", "poet")


@pytest.fixture(scope="module")
def folders(tiny_llama, tmp_path_factory) -> dict[str, Path]:
    work = tmp_path_factory.mktemp("adapters")
    names = ("sql", "poet")
    return {name: write_adapter(work / name, tiny_llama, seed=i) for i, name in enumerate(names)}


@pytest.fixture(scope="module")
def engine(tiny_llama, folders) -> Engine:
    return Engine.from_pretrained(tiny_llama, adapters=folders)


@pytest.fixture
def both(folders) -> list[str]:
    return [f"--adapter={name}={folder}" for name, folder in folders.items()]


def test_a_prompt_runs_with_the_only_adapter(tiny_llama, engine, both, capsys):
    words = [str(tiny_llama), "--prompt", "import os", *SHORT, "--quiet"]
    texts = set[str]()
    for name, option in zip(NAMES, ([], both[:1], both[1:]), strict=True):
        assert predict.main([*words, *option]) == 0
        params = SamplingParams(max_tokens=6, adapter=name)
        expected = engine.generate(["import os"], params)[0].text + "\n"
        assert capsys.readouterr().out == expected
        texts.add(expected)
    assert len(texts) == 3


@pytest.mark.parametrize("beams", [False, True])
def test_rows_name_their_adapter(tiny_llama, engine, both, tmp_path, beams):
    rows = [{"src": "import os", "tgt": " as x"} for _ in range(5)]
    names = ["poet", None, "sql", "none", 3]
    for row, name in zip(rows[1:], names[1:], strict=True):
        row |= {"adapter": name}
    options = ["--quiet", *(["--beam-width", "2"] if beams else [])]
    own = [both[1]]  # of several, a row without the key runs without
    for given, first in ((own, "poet"), (both, None)):
        found = answered(tiny_llama, tmp_path, *rows, options=[*options, *given], code=1)
        loaded = [first, None] + (["sql"] if given is both else [])
        for row, name in zip(found, loaded, strict=False):
            if beams:
                params = BeamParams(beam_width=2, max_tokens=6, adapter=name)
                text = beam_search(engine, ["import os"], params)[0][0].text(engine.tokenizer)
            else:
                params = SamplingParams(max_tokens=6, adapter=name)
                text = engine.generate(["import os"], params)[0].text
            assert row["output"] == text
        chances = [row["logprob"] for row in found[: len(loaded)]]
        assert len({*chances}) == len({*loaded})
        assert "found 'none'; loaded: " in found[3]["error"]
        assert "'adapter' is 3" in found[4]["error"]


def test_a_chat_runs_with_it(tiny_llama, engine, both, tmp_path, monkeypatch, capsys):
    folder = shutil.copytree(tiny_llama, tmp_path / "model")
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    assert chat.main([str(folder), both[0], "--max-tokens", "6"]) == 0
    params = SamplingParams(max_tokens=6, adapter="sql")
    assert capsys.readouterr().out == engine.generate(["hello"], params)[0].text + "\n"


@pytest.mark.usefixtures("engines_here")
def test_a_bench_takes_turns_with_them(tiny_llama, engine, both, capsys):
    load = Load(batch=4, prompt_tokens=8, new_tokens=4)
    [found] = ask(engine, load)
    for output, adapter in zip(found, ("sql", "poet", "sql", "poet"), strict=True):
        params = SamplingParams(max_tokens=4, ignore_eos=True, adapter=adapter)
        assert engine.generate([output.prompt_token_ids], params)[0].token_ids == output.token_ids
    words = [str(tiny_llama), "--batch", "2", "--prompt", "8", "--new", "4", "--repeats", "1"]
    assert bench.main([*words, *both]) == 0
    out = capsys.readouterr().out
    assert f"{tiny_llama}, no adapters: the same weights" in out
    assert "adapters sql, poet" in out


MAINS = {"predict": predict.main, "chat": chat.main, "bench": bench.main, "serve": serve.main}


@pytest.mark.parametrize(
    ("command", "words", "told"),
    [
        ("predict", "--adapter sql --prompt x", "found 'sql'; NAME=FOLDER is needed"),
        ("serve", "--adapter =folder", "NAME=FOLDER is needed"),
        ("serve", "--adapter a=b --adapter a=c", "a is the name of b already"),
        ("predict", "--adapter a=b --adapter c=d --prompt x", "--prompt runs with one --adapter"),
        ("chat", "--adapter a=b --adapter c=d", "a chat runs with one --adapter"),
        ("predict", "--adapter a=not/there --prompt x", "not/there"),
        ("chat", "--adapter a=not/there", "not/there"),
        ("bench", "--adapter a=not/there", "not/there"),
        ("serve", "--adapter a=not/there", "not/there"),
        ("serve", "--adapter tiny=b --served-model-name tiny", "so the model is called"),
        ("serve", "--engine vllm --adapter a=b", "--engine vllm does not take --adapter"),
        ("bench", "--adapter a=b --task repeated --speculate ngram", "leave --task and --peer out"),
    ],
)
def test_what_does_not_fit_is_told_before_a_model_is_loaded(
    tiny_llama, tmp_path, monkeypatch, capsys, command, words, told
):
    folder = tiny_llama
    if command == "chat":
        folder = shutil.copytree(tiny_llama, tmp_path / "model")
        (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    monkeypatch.setattr(Engine, "__init__", lambda *_, **__: pytest.fail("was loaded"))
    try:
        code = run_command(MAINS[command], [str(folder), *words.split()])
    except SystemExit as end:
        code = end.code
    assert code == 2
    assert told in capsys.readouterr().err
