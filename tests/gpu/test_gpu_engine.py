"""The engine on a GPU: every recipe as accurate as on the CPU, graphs as steps one by one."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from calibrate.data import load_tokens
from formats.checkpoint import Checkpoint
from inference.accuracy import compare
from inference.config import EngineConfig
from inference.engine import Engine
from inference.request import SamplingParams
from ptq.recipe import load_recipe
from ptq.run import main

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))
SCHEMES = ["float", "w4c8", "w8", "a8w8c8", "a8w8c8_dynamic", "a8w4c8", "fp8_c8", "fp8_block"]
SMALLER = (
    "dataset.calibration.samples=32",
    "dataset.evaluation.samples=32",
    "report.speed=false",
)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", RECIPES)
def test_recipes_end_to_end(name, tmp_path, monkeypatch):
    """Quantized, measured on the GPU, and as accurate there as on the CPU."""
    monkeypatch.chdir(tmp_path)
    recipe = ROOT / "recipes" / f"{name}.yaml"
    settings = [*SMALLER, f"output.path={tmp_path / 'run'}", "report.device=cuda"]
    arguments = [part for setting in settings for part in ("--set", setting)]
    assert main([str(recipe), *arguments]) in (0, 1)  # 1: thresholds are for all of the data
    loaded = load_recipe(recipe)
    source = loaded.model.path
    tokenizer = AutoTokenizer.from_pretrained(source)
    sequences = load_tokens(loaded.dataset, tokenizer, "evaluation").sequences()[:16]
    found = {}
    for device in ("cpu", "cuda"):
        pair = [
            Engine.from_pretrained(path, device=device, config=EngineConfig(max_model_len=512))
            for path in (source, tmp_path / "run" / "checkpoint")
        ]
        found[device] = compare(*pair, sequences)
    cpu, gpu = found["cpu"], found["cuda"]
    print(
        f"\n{name}: KL cpu {cpu.kl_mean:.4f} gpu {gpu.kl_mean:.4f}, ratio cpu "
        f"{cpu.perplexity_ratio:.4f} gpu {gpu.perplexity_ratio:.4f}"
    )
    assert gpu.kl_mean < 1.1 * cpu.kl_mean + 1e-3
    assert abs(gpu.perplexity_ratio - cpu.perplexity_ratio) < 0.01


def random_engine(scheme: str, **config) -> Engine:
    from inference.load import load_model
    from inference.random_checkpoint import SHAPES
    from inference.random_model import RandomCheckpoint, random_tokenizer

    SHAPES["small"] = SHAPES["llama-3-8b"] | {"num_hidden_layers": 2, "vocab_size": 4096}
    checkpoint = RandomCheckpoint("small", scheme, "cuda", quantize_head=scheme != "float")
    model = load_model(checkpoint, device="cuda")
    sizes = EngineConfig(**({"max_model_len": 1024, "max_batch_size": 16} | config))
    return Engine(checkpoint, model, random_tokenizer(4096), sizes)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_graphs_give_the_tokens_of_steps_one_by_one(scheme):
    """As long as none waits for a place: then both run the same batches."""
    generator = torch.Generator().manual_seed(0)
    prompts = [
        torch.randint(4096, (int(n),), generator=generator).tolist()
        for n in torch.randint(1, 400, (16,), generator=generator)
    ]
    params = [
        SamplingParams(max_tokens=8 + i, ignore_eos=True, temperature=0.8 * (i % 2), seed=i)
        for i in range(len(prompts))
    ]
    tokens = []
    for eager in (True, False):
        engine = random_engine(scheme, eager=eager, max_batched_tokens=512)
        tokens.append([out.token_ids for out in engine.generate(prompts, params)])
        engine.check_integrity()
        del engine
        torch.cuda.empty_cache()
    assert tokens[0] == tokens[1]
    assert [len(own) for own in tokens[0]] == [8 + i for i in range(len(prompts))]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_kernels_that_start_early_give_the_same_tokens(scheme):
    """What a kernel reads is there, though it started before the kernel ahead had ended."""
    from kernels.triton.common import alone

    prompts = [[7 * i + j for j in range(40 * i + 1)] for i in range(8)]
    tokens = []
    for context in (contextlib.nullcontext, alone):
        engine = random_engine(scheme)
        greedy = SamplingParams(max_tokens=100, ignore_eos=True)
        with context():
            tokens.append([out.token_ids for out in engine.generate(prompts, greedy)])
    assert tokens[0] == tokens[1]


def test_steps_do_not_wait_for_the_host(monkeypatch):
    """A decode step launches without one synchronization."""
    engine = random_engine("a8w8c8")
    for i in range(4):
        engine.add_request([5 + i] * 30, SamplingParams(max_tokens=30, ignore_eos=True))
    for _ in range(6):
        engine.step()
    from inference.gpu import runner

    land = runner.Launched.tokens

    def allowed(self):
        torch.cuda.set_sync_debug_mode("default")
        try:
            return land(self)
        finally:
            torch.cuda.set_sync_debug_mode("error")

    monkeypatch.setattr(runner.Launched, "tokens", allowed)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(10):
            assert len(engine.step()) == 4
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_checkpoint_on_disk_loads(tiny_llama, make_quantized):
    path = make_quantized(tiny_llama, "a8w8c8")
    engine = Engine.from_pretrained(path, device="cuda")
    assert Checkpoint.open(path).scheme.wac == "a8w8c8"
    output = engine.generate(["def add(a, b):"], SamplingParams(max_tokens=9, ignore_eos=True))[0]
    assert len(output.token_ids) == 9
