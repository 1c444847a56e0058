"""transformers' own code on a GPU: the CPU's logits, and graphs as steps one by one."""

from __future__ import annotations

import logging

import pytest
import torch

from inference.config import EngineConfig
from inference.engine import Engine
from inference.requests.request import SamplingParams
from inference.transformers_code.model import CodeModel
from tests.families import distance
from tests.gemma4 import write_wide
from tests.inference.transformers_code.test_transformers_code import KINDS, SMALL, ids_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
WITHOUT_GRAPHS = ("deepseek_v2", "gpt_oss", "olmoe")  # which experts run is asked of the host


def engine_of(folder, device: str = "cuda", **config) -> Engine:
    sizes = {"max_batched_tokens": 64, "max_batch_size": 4, "transformers_code": True} | config
    return Engine.from_pretrained(folder, config=EngineConfig(**sizes), device=device)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_cpu(make_model, kind, caplog):
    """In chunks; then tokens are generated, from graphs where the code asks nothing of the host."""
    folder, ids = make_model(kind, **(SMALL | KINDS[kind])), ids_of(150).tolist()
    engine = engine_of(folder)
    assert isinstance(engine.model, CodeModel)
    assert distance(engine.score(ids).cpu(), engine_of(folder, "cpu").score(ids)) < 0.06
    with caplog.at_level(logging.WARNING, "ptq.inference"):
        outputs = engine.generate([ids[:n] for n in (5, 33, 17, 40)], GREEDY)
    engine.check_integrity()
    assert all(len(output.token_ids) == 24 for output in outputs)
    assert ("no CUDA graph holds" in caplog.text) == (kind in WITHOUT_GRAPHS)


def test_heads_of_512_beside_others(tmp_path):
    """Those of Gemma 4's global layers: a few chunks, then graphs of next tokens."""
    folder, ids = write_wide(tmp_path / "float", 512), ids_of(150).tolist()
    engine = engine_of(folder)
    assert distance(engine.score(ids).cpu(), engine_of(folder, "cpu").score(ids)) < 0.06
    engine.warm_up()
    outputs = engine.generate([ids[:n] for n in (5, 33, 17, 40)], GREEDY)
    engine.check_integrity()
    assert all(len(output.token_ids) == 24 for output in outputs)


@pytest.mark.parametrize("kind", ["gemma2", "opt", "stablelm"])
def test_graphs_give_the_tokens_of_steps_one_by_one(make_model, kind):
    folder, ids = make_model(kind, **(SMALL | KINDS[kind])), ids_of(90).tolist()
    prompts = [ids[:n] for n in (5, 70, 17, 40)]
    runs = []
    for eager in (False, True):
        engine = engine_of(folder, eager=eager)
        engine.warm_up()
        runs.append([o.token_ids for o in engine.generate(prompts, GREEDY)])
        assert bool(engine.loop.runner.graphs.captured) != eager
    assert runs[0] == runs[1]


@pytest.mark.parametrize("preset", ["a8w8c8", "a8w8_dynamic", "w4", "fp8_c8"])
def test_quantized_layers_and_caches_are_those_of_the_fast_path(make_model, make_quantized, preset):
    sizes = {"head_dim": 64, "hidden_size": 256, "intermediate_size": 512}
    folder, ids = make_quantized(make_model("llama", **sizes), preset), ids_of(150).tolist()
    slow, fast = engine_of(folder), engine_of(folder, transformers_code=False)
    assert [p.k.dtype for p in slow.pools] == [p.k.dtype for p in fast.pools]
    exact = Engine.from_pretrained(folder, config=EngineConfig(max_model_len=256)).score(ids)
    own, usual = (distance(engine.score(ids).cpu(), exact) for engine in (slow, fast))
    assert own < 1.3 * usual + 0.01  # both round as 16 bits do, at other places
