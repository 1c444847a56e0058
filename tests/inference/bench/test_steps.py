"""The GPU's table without a GPU: prompts that count as computed, its lines, its files, refusals."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from formats.command import run_command
from formats.errors import EngineError
from inference.bench import command as bench
from inference.bench import steps
from inference.bench.steps import Figures, Step, describe, table, to_json
from inference.config import EngineConfig
from inference.engine import Engine
from inference.requests.request import SamplingParams

STEPS = [Step(1, 2.0, 1.9, 0.1, 1.4), Step(16, 4.0, 3.0, 0.2, 2.0)]
FIGURES = Figures("a8w8c8", STEPS, 100.0, 6.25, 8 * 10**9, 2 * 10**9, 11 * 10**9)


def test_prompts_that_count_as_computed(tiny_llama):
    config = EngineConfig(max_batch_size=2, max_batched_tokens=2, max_model_len=192, kv_blocks=6)
    engine = Engine.from_pretrained(tiny_llama, config=config)
    steps.fill(engine, 2, 100)
    assert engine.stats().used == 4
    first = engine.step()
    assert [len(output.token_ids) for output in first] == [1, 1]  # no step went to the prompts
    late = engine.add_request([1, 2])
    with pytest.raises(EngineError, match="no place is free"):
        engine.assume_computed(late)
    engine.abort(late)
    engine.check_integrity()
    lengths = {}
    while engine.has_unfinished:
        lengths |= {output.request_id: len(output.token_ids) for output in engine.step()}
    assert list(lengths.values()) == [steps.WARM_UP + steps.STEPS] * 2
    engine.check_integrity()
    assert engine.stats().free == 6


def test_the_bytes_that_a_step_reads(make_model):
    folder = make_model("qwen3_moe", moe_intermediate_size=64, num_experts=4, num_experts_per_tok=2)
    engine = Engine.from_pretrained(folder, config=EngineConfig(max_model_len=128, kv_blocks=2))
    model = engine.model
    parts = [layer.feed_forward for layer in model.layers]
    experts = sum(part.gate_up.nbytes + part.down.nbytes for part in parts)
    whole = model.head.nbytes + sum(layer.nbytes for layer in model.layers)
    cached = 100 * engine.kv_bytes_per_token
    assert steps.step_bytes(engine, 1, 0) == whole - experts / 2
    assert steps.step_bytes(engine, 3, 0) == whole - experts / 8
    assert steps.step_bytes(engine, 1, 100) - steps.step_bytes(engine, 1, 0) == cached


def test_too_few_blocks_change_nothing(tiny_llama):
    config = EngineConfig(max_batch_size=2, max_model_len=128, kv_blocks=2)
    engine = Engine.from_pretrained(tiny_llama, config=config)
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    wanted = engine.generate([[5] * 100], params)[0].token_ids
    first, second = (engine.add_request([5] * 100, params) for _ in "ab")
    engine.assume_computed(first)
    with pytest.raises(EngineError, match="too few blocks"):
        engine.assume_computed(second)
    found = {}
    while engine.has_unfinished:
        found |= {output.request_id: output.token_ids for output in engine.step()}
    assert found[second] == wanted


def test_the_lines_of_a_scheme():
    first, second, last = describe(FIGURES)
    assert (
        "batch   1:   2.000 ms a step,    500 tokens/s, 70% of a copy's bandwidth; graph" in first
    )
    assert "4000 tokens/s" in second
    assert "beyond the graph 25.0%" in second
    assert (
        "81920 tokens/s; 1 x 128: 6.2 ms; peak memory 11.00 GB of 8.00 weights and 2.00 cache"
        in last
    )


def test_the_table_holds_all_schemes():
    head, rule, *rows = table([FIGURES, FIGURES], 4048).splitlines()
    assert head.startswith(
        "| context 4048, tokens/s | batch 1 | batch 16 | prefill 8 x 1024 | first token of 128 |"
    )
    assert rule.count("---") == 7
    assert rows == [
        "| a8w8c8 | 500 (70%) | 4,000 (50%) | 81,920 | 6.2 ms | 5.0% to 25.0% | 11.0 / 10.0 GB |",
    ] * 2  # fmt: skip


def test_the_file_says_what_is_missing():
    data = json.loads(to_json("Chip", "llama-3-8b", 4048, [FIGURES], {"float": "too small"}))
    assert data["schemes"][0]["tokens_s"] == {"1": 500.0, "16": 4000.0}
    assert data["schemes"][0]["steps"][1]["host"] == 0.2
    assert data["missing"] == {"float": "too small"}


def test_a_scheme_that_does_not_fit_is_told_and_the_others_measured(monkeypatch, tmp_path, capsys):
    def measure(shape, scheme, batches, context, head, ranks):
        if scheme == "float":
            raise EngineError("memory is too small")
        return FIGURES

    monkeypatch.setattr(steps, "measure", measure)
    monkeypatch.setattr("inference.backend.require_device", lambda device: None)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "Chip")
    file = tmp_path / "gpu.json"
    assert bench.measure_steps(["--schemes", "float", "a8w8c8", "a8w8c8", "--json", str(file)]) == 1
    out = capsys.readouterr().out
    assert "float: memory is too small" in out
    assert out.count("| a8w8c8 |") == 1
    assert len(json.loads(file.read_text())["schemes"]) == 1


@pytest.mark.parametrize("command", [["--schemes", "a8w8c8"], ["--schemes", "w5"]])
def test_one_line_says_why_it_does_not_run(command, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert run_command(bench.measure_steps, command) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert err.startswith("error: ")
    assert ("torch sees 0 GPUs" if "a8w8c8" in command else "found 'w5'") in err


@pytest.mark.parametrize("command", [[], ["--host"]])
def test_a_gpu_without_triton(command, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setitem(sys.modules, "triton", None)
    assert run_command(bench.measure_steps, command) == 2
    start = "--host plans steps as for a GPU, and" if command else "device:"
    assert capsys.readouterr().err == (
        f"error: {start} a GPU needs Triton, which is not installed: pip install "
        f"'triton>=3.6' (for torch {torch.__version__})\n"
    )


@pytest.mark.parametrize("arguments", [["--batch", "0"], ["--context", "0"]])
def test_sizes_that_mean_nothing_are_refused(arguments):
    with pytest.raises(SystemExit) as caught:
        bench.measure_steps(arguments)
    assert caught.value.code == 2
