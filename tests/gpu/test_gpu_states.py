"""Models that keep a recurrent state, on a GPU: the CPU's logits, graphs as steps one by one."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from inference.config import EngineConfig
from inference.engine import Engine
from inference.requests.request import SamplingParams
from inference.transformers_code.linear import RoutedExperts
from tests.inference.gpu.test_gpu_states import check_greedy, check_states, distances
from tests.inference.transformers_code.test_states import ALL, ids_of, write_small

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)


def engine_of(folder: Path, device: str = "cuda", **config) -> Engine:
    sizes = {"max_batched_tokens": 70, "max_batch_size": 4, "max_model_len": 192} | config
    return Engine.from_pretrained(folder, config=EngineConfig(**sizes), device=device)


@pytest.mark.parametrize("kind", ALL)
def test_logits_and_tokens_are_those_of_the_cpu(tmp_path, kind, caplog):
    """In chunks; then prompts twice, the second time from kept states, and their next tokens from
    graphs where the code asks nothing of the host."""
    folder = write_small(kind, tmp_path)
    exact, engine = engine_of(folder, "cpu"), engine_of(folder)
    experts = any(isinstance(m, RoutedExperts) for m in engine.model._module.modules())
    off = distances(engine, exact, ids_of(150))
    assert off.median() < 0.03
    assert off.mean() < (0.15 if experts else 0.05)  # a router may choose another expert
    prompts = [ids_of(n, seed=n) for n in (5, 90, 1, 66)]
    with caplog.at_level(logging.WARNING, "ptq.inference"):
        for _ in range(2):
            for ids, output in zip(prompts, engine.generate(prompts, GREEDY), strict=True):
                check_greedy(exact, ids, output.token_ids, 1.5 if experts else 0.4)
            engine.check_integrity()
    assert engine.stats().hit_tokens == 2 * 64
    assert ("no CUDA graph holds" in caplog.text) == experts
    assert bool(engine.loop.runner._captured) != experts


@pytest.mark.parametrize("kind", ["falcon_h1", "lfm2", "mamba2"])
def test_graphs_give_the_tokens_of_steps_one_by_one(tmp_path, kind):
    folder, prompts = write_small(kind, tmp_path), [ids_of(n, seed=n) for n in (5, 90, 17)]
    runs = []
    for eager in (False, True):
        engine = engine_of(folder, eager=eager)
        engine.warm_up()
        runs.append([o.token_ids for o in engine.generate(prompts, GREEDY)])
        assert bool(engine.loop.runner._captured) != eager
        assert not any(size.prompts for size in engine.loop.runner._captured)
    assert runs[0] == runs[1]


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("kind", ["bamba", "lfm2"])
def test_random_requests_are_those_of_the_cpu(tmp_path, kind, eager):
    """With chunks, hits, preemption, aborts, few snapshots, beams, a text scored among them."""
    folder = write_small(kind, tmp_path)
    engine = engine_of(folder, kv_blocks=5, state_snapshots=3, eager=eager)
    check_states(engine_of(folder, "cpu"), engine, 0.4, 60)


@pytest.mark.parametrize("preset", ["a8w8c8", "w4"])
@pytest.mark.parametrize("kind", ["bamba", "lfm2"])
def test_quantized_layers_and_caches(tmp_path, kind, preset):
    from ptq.methods.rtn import RTNSpec
    from tests.ptq.quantizing import make_plan, quantize_tokens, random_tokens

    plan = make_plan(write_small(kind, tmp_path), tmp_path / "out", preset, methods=(RTNSpec(),))
    folder = quantize_tokens(plan, random_tokens(), progress=False).checkpoint
    exact, engine = engine_of(folder, "cpu"), engine_of(folder)
    assert [p.k.dtype for p in engine.pools if preset == "w4"] != [torch.int8]
    assert distances(engine, exact, ids_of(150)).mean() < 0.15
    (output,) = engine.generate([ids_of(90)], GREEDY)
    check_greedy(exact, ids_of(90), output.token_ids, 0.8)
