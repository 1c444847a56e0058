"""Speed figures from known times, turns, memory of worker processes, and the command."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch

from formats.command import run_command
from formats.errors import CheckpointError, EngineError, RequestError
from inference.bench import command as bench
from inference.bench import requests
from inference.bench.figures import describe, measure_in_turns, summarize
from inference.bench.load import TOKEN, Load, Oracle, Run, ask, between_tokens, chance_of, run_once
from inference.bench.requests import EngineProcess, EngineSource
from inference.config import EngineConfig, SpeculateConfig
from inference.engine import Engine
from inference.speculate.counts import DraftCounts

LOAD = Load(batch=2, prompt_tokens=10, new_tokens=3)


@pytest.fixture(scope="module")
def engine(tiny_llama) -> Engine:
    config = EngineConfig(max_batch_size=2, max_model_len=64, kv_blocks=2)
    return Engine.from_pretrained(tiny_llama, config=config)


def a_run(prefill: float, decode: float = 0.5) -> Run:
    return Run(prefill, decode, 4, [prefill, prefill / 2], [0.1, 0.2, 0.3, 0.4], 10**9, 64, 1000)


def test_figures_follow_from_the_times():
    speed = summarize(LOAD, [a_run(2.0), a_run(1.0), a_run(4.0)])
    assert (speed.batch, speed.prompt_tokens, speed.new_tokens, speed.repeats) == (2, 10, 3, 3)
    assert speed.prefill_tokens_s.model_dump() == {"median": 10.0, "low": 5.0, "high": 20.0}
    assert speed.decode_tokens_s.median == 8.0
    assert speed.first_token_ms.p50 == pytest.approx(1500)  # of 2, 1, 1, .5, 4, 2 seconds
    assert speed.per_token_ms.p50 == pytest.approx(250)
    assert (speed.per_token_ms.p90, speed.per_token_ms.p99) == pytest.approx((400, 400))
    assert (speed.peak_memory_bytes, speed.kv_bytes_per_token, speed.weight_bytes) == (
        10**9,
        64,
        1000,
    )


def test_models_take_turns_and_warm_ups_do_not_count():
    order: list[str] = []

    def runner(name: str):
        def run(load: Load) -> Run:
            assert load == LOAD
            order.append(name)
            return a_run(100.0 if len(order) <= 4 else 1.0)

        return run

    speeds = measure_in_turns([runner("A"), runner("B")], LOAD, warmup=2, repeats=3)
    assert "".join(order) == "ABABABABAB"
    assert all(speed.prefill_tokens_s.low == 20.0 for speed in speeds)


def test_no_run_to_count_is_refused():
    with pytest.raises(RequestError, match="at least one run"):
        measure_in_turns([], LOAD, repeats=0)


def test_a_real_run_counts_every_token(engine):
    run = run_once(engine, Load(batch=2, prompt_tokens=20, new_tokens=8))
    assert len(run.first_token_s) == 2
    assert len(run.per_token_s) == 2 * 7
    assert run.decode_tokens == 2 * 7
    assert 0 < run.prefill_s < run.prefill_s + run.decode_s
    assert all(0 < t <= run.prefill_s * 1.001 for t in run.first_token_s)
    assert run.kv_bytes_per_token == engine.kv_bytes_per_token
    assert run.weight_bytes == engine.checkpoint.nbytes
    assert run.peak_memory_bytes > 50e6
    engine.check_integrity()


def test_prompts_in_chunks_count_decoded_tokens_once(tiny_llama):
    config = EngineConfig(max_batch_size=3, max_model_len=64, max_batched_tokens=16)
    chunked = Engine.from_pretrained(tiny_llama, config=config)
    run = run_once(chunked, Load(batch=3, prompt_tokens=20, new_tokens=6))
    assert len(run.per_token_s) == 3 * 5
    assert run.decode_tokens < 3 * 5  # some came while other prompts were still computed


def test_tokens_of_a_step_share_its_time():
    assert between_tokens([1.0, 2.0, 2.0, 5.0]) == [0.5, 0.5, 3.0]
    assert between_tokens([1.0, 1.0, 2.0]) == [0.0, 1.0]


def test_a_run_with_drafts_tells_what_became_of_them(tiny_llama):
    drafts = SpeculateConfig(method="ngram", depth=2)
    config = EngineConfig(max_batch_size=2, max_model_len=64, kv_blocks=2, speculate=drafts)
    speculating = Engine.from_pretrained(tiny_llama, config=config)
    load = Load(batch=1, prompt_tokens=8, new_tokens=40)
    runs = [run_once(speculating, load) for _ in range(2)]
    assert all(len(run.per_token_s) == 39 for run in runs)
    for found in (run.drafts for run in runs):  # each run's own
        assert 0 < found.steps < 40
        assert found.steps == found.proposed[0]
        assert 0 < sum(found.accepted) <= sum(found.proposed)


def test_drafts_of_several_runs_are_warnings_together():
    counts = DraftCounts(3, (3, 2, 0), (2, 1, 0)), DraftCounts(1, (1, 1, 0, 0), (0, 0, 0, 0))
    speed = summarize(LOAD, [replace(a_run(1.0), drafts=found) for found in counts])
    assert speed.drafts.model_dump() == {
        "steps": 4,
        "proposed": (4, 3),
        "accepted": (2, 1),
        "tokens_per_step": 1 + 3 / 4,
    }
    assert summarize(LOAD, [a_run(1.0)]).drafts is None
    never = replace(a_run(1.0), drafts=DraftCounts(0, (0, 0), (0, 0)))
    found = summarize(LOAD, [never]).drafts
    assert (found.steps, found.proposed, found.tokens_per_step) == (0, (), 1.0)


@pytest.mark.parametrize(
    "words", [["--speculate", "ngram", "--depth", "3"], ["--acceptance", "2", "--depth", "3"]]
)
def test_the_command_tells_drafts_with_each_load(tiny_llama, tmp_path, capsys, request, words):
    if words[0] == "--speculate":  # fakes are made by a process of its own
        request.getfixturevalue("engines_here")
    file = tmp_path / "speed.json"
    arguments = [str(tiny_llama), "--batch", "1", "2", "--prompt", "8", "--new", "40", *words]
    assert bench.main([*arguments, "--repeats", "2", "--json", str(file)]) == 0
    data = json.loads(file.read_text())
    plain, own = data["results"][::2], data["results"][1::2]
    assert [row["batch"] for row in own] == [1, 2]
    assert all(row["model"] == f"{tiny_llama}, no drafts" for row in plain)
    assert all(row["drafts"] is None for row in plain)
    lines = [line for line in capsys.readouterr().out.splitlines() if "a step with drafts" in line]
    for row, line in zip(own, lines, strict=True):
        found = row["drafts"]
        assert found["steps"] == found["proposed"][0] > 0
        assert 1 <= len(found["proposed"]) == len(found["accepted"]) <= 3
        assert all(a <= p for a, p in zip(found["accepted"], found["proposed"], strict=True))
        assert found["tokens_per_step"] == 1 + sum(found["accepted"]) / found["steps"]
        assert f"{found['tokens_per_step']:.2f} tokens a step with drafts" in line
        assert f"(drafted {found['steps']} times)" in line
    told = "faked" if words[0] == "--acceptance" else "drafts by ngram, depth 3"
    assert sum(told in note for note in data["notes"]) == 1


@pytest.fixture(scope="module")
def undrafted(tiny_llama) -> Engine:
    """An engine that gives the wanted tokens without drafts."""
    config = EngineConfig(max_batch_size=3, max_model_len=512, prefix_cache=False)
    runner = Engine.from_pretrained(tiny_llama, config=config)
    load = Load(batch=3, prompt_tokens=9, new_tokens=240, token=TOKEN)
    assert [output.token_ids for output in ask(runner, load)[0]] == [[TOKEN] * 240] * 3
    return runner


@pytest.mark.parametrize(("acceptance", "depth"), [(1.0, 2), (3.0, 4), (2.2, 3), (6.0, 5)])
def test_faked_drafts_come_as_often_as_is_asked(undrafted, acceptance, depth):
    p, runner = chance_of(acceptance, depth), undrafted
    assert sum(p**i for i in range(depth + 1)) == pytest.approx(acceptance)
    load = Load(batch=3, prompt_tokens=9, new_tokens=240, token=TOKEN)
    runner.speculate_by(Oracle(TOKEN, p), depth)
    assert [output.token_ids for output in ask(runner, load)[0]] == [[TOKEN] * 240] * 3
    found = run_once(runner, load).drafts
    assert found.tokens_per_step == pytest.approx(acceptance, rel=0.12)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--acceptance", "3"], "give --depth N"),
        (["--acceptance", "6", "--depth", "auto"], "4 drafts give from 1 to 5"),
        (["--acceptance", "3", "--depth", "4", "--speculate", "ngram"], "no --speculate"),
        (["--acceptance", "6", "--depth", "4"], "4 drafts give from 1 to 5"),
        (["--depth", "4"], "give --speculate"),
    ],
)
def test_what_cannot_be_faked_is_refused(tiny_llama, capsys, words, told):
    assert run_command(bench.main, [str(tiny_llama), "--batch", "1", *words]) == 2
    assert told in capsys.readouterr().err


def test_measure_speed_in_this_process(engine):
    load = Load(batch=1, prompt_tokens=8, new_tokens=4)
    (speed,) = measure_in_turns([partial(run_once, engine)], load, warmup=0, repeats=2)
    assert speed.repeats == 2
    assert 0 < speed.decode_tokens_s.low <= speed.decode_tokens_s.median


@pytest.mark.parametrize(("batch", "prompt"), [(3, 8), (2, 64)])
def test_a_batch_that_cannot_run_at_once_is_refused(engine, batch, prompt):
    with pytest.raises(RequestError, match="lower the batch") as caught:
        run_once(engine, Load(batch=batch, prompt_tokens=prompt, new_tokens=4))
    assert caught.value.param == "batch"


def test_a_worker_passes_errors_on(tmp_path):
    source = EngineSource(str(tmp_path / "nothing"), EngineConfig())
    with EngineProcess(source) as missing, pytest.raises(CheckpointError, match="no such folder"):
        missing.run(LOAD)


def test_a_workers_memory_is_its_own_and_its_end_is_told(tiny_llama):
    held = torch.ones(400_000_000)  # more than a worker has that imports torch with CUDA
    with EngineProcess(EngineSource(str(tiny_llama), EngineConfig())) as worker:
        assert worker.run(LOAD).peak_memory_bytes < held.nbytes
        worker._process.kill()
        with pytest.raises(EngineError, match=r"exit code -9"):
            worker.run(LOAD)


def test_the_command_compares_two_models(tiny_llama, make_quantized, tmp_path, capsys):
    quantized, file = make_quantized(tiny_llama), tmp_path / "speed.json"
    arguments = [str(quantized), "--against", str(tiny_llama), "--batch", "2", "1"]
    arguments += ["--prompt", "8", "--new", "4", "--repeats", "2", "--json", str(file)]
    assert bench.main(arguments) == 0
    out = capsys.readouterr().out
    assert "8 prompt + 4 new tokens a request, median of 2 runs" in out
    assert f"batch 1: {quantized} runs prefill at" in out
    data = json.loads(file.read_text())
    rows = [(row["model"], row["batch"]) for row in data["results"]]
    assert rows == [(str(m), b) for b in (1, 2) for m in (tiny_llama, quantized)]
    original, int8 = data["results"][:2]
    assert int8["kv_bytes_per_token"] * 4 == original["kv_bytes_per_token"]
    assert int8["weight_bytes"] < original["weight_bytes"]
    assert data["environment"]["threads"] >= 1


def test_one_model_has_no_ratios():
    lines = describe([[("model", summarize(LOAD, [a_run(1.0)]))]])
    assert not any("the speed of" in line for line in lines)


def test_a_wrong_path_is_told_before_anything_runs(tmp_path, capsys):
    assert run_command(bench.main, [str(tmp_path / "nothing")]) == 2
    assert "no such folder" in capsys.readouterr().err


def test_a_device_that_is_none_is_told_before_anything_is_loaded(tiny_llama, monkeypatch, capsys):
    monkeypatch.setattr(requests, "EngineProcess", None)
    assert run_command(bench.main, [str(tiny_llama), "--device", "cuda:99"]) == 2
    err = capsys.readouterr().err
    assert err.splitlines()[-1].startswith("error: device: found 'cuda:99', but torch sees")


@pytest.mark.parametrize("arguments", [["--batch", "0"], ["--new", "1"], ["--prompt", "x"]])
def test_useless_lengths_are_refused(arguments):
    with pytest.raises(SystemExit) as caught:
        bench.main(["checkpoint", *arguments])
    assert caught.value.code == 2


def test_arguments_are_read_before_anything_heavy_is_imported():
    code = (
        "import sys\n"
        "from inference.bench.command import main\n"
        "for mode in ([], ['--steps'], ['--kernels', '--device', 'cpu'], ['--tune']):\n"
        "    try:\n"
        "        main([*mode, '--nothing-of-that-name'])\n"
        "    except SystemExit as end:\n"
        "        assert end.code == 2\n"
        "print('torch' in sys.modules, 'transformers' in sys.modules)\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.stdout == "False False\n", found.stderr


def test_help_names_the_modes_and_each_has_its_own(capsys):
    for arguments, words in (
        ([], ("\n  --steps ", "\n  --kernels ", "\n  --tune ", "--peer-format")),
        (["--steps"], ("usage: ptq bench --steps", "--schemes")),
        (["--kernels"], ("usage: ptq bench --kernels", "--markdown")),
        (["--tune"], ("usage: ptq bench --tune", "--output")),
    ):
        with pytest.raises(SystemExit) as caught:
            bench.main([*arguments, "--help"])
        assert caught.value.code == 0
        out = capsys.readouterr().out
        assert all(word in out for word in words), arguments
