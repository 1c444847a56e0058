"""Drafts on a GPU: what comes is what comes without, in fewer steps.

A step of drafts has other rows than a step without, and the last bits of logits depend on how many
rows share a step: tokens may differ where two logits nearly tie, and are compared as far as there.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from inference.config import EngineConfig, SpeculateConfig
from inference.engine import Engine
from inference.requests.constraint import Constraint
from inference.requests.request import RequestOutput, SamplingParams
from tests.gpu.test_gpu_engine import random_engine
from tests.inference.speculate.requests import Replay

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
TINY = Path(__file__).resolve().parents[2] / "recipes" / "tiny-python"
SCHEMES = ["float", "w4c8", "a8w8c8", "a8w8c8_dynamic", "fp8_c8", "c4", "a8w4c4_two_level"]
NEAR = 0.3  # between log probabilities of tokens that nearly tie


def drafted(engine: Engine, wanted: list[RequestOutput], chance: float, depth: int | None) -> None:
    texts = [[*output.prompt_token_ids, *output.token_ids] for output in wanted]
    engine.speculate_by(Replay(texts, chance, engine.model.config.vocab_size), depth)


def same_as_far_as_ties(found: RequestOutput, wanted: RequestOutput) -> int:
    """How many tokens come before the first that differs, which nearly ties with the other."""
    assert found.logprobs is not None
    assert wanted.logprobs is not None
    rows = zip(found.token_ids, wanted.token_ids, found.logprobs, wanted.logprobs, strict=True)
    for i, (own, other, told, asked) in enumerate(rows):
        for token in {own, other} & told.keys() & asked.keys():
            assert told[token] == pytest.approx(asked[token], abs=NEAR)
        if own != other:
            assert asked[other] - asked[own] < NEAR
            return i
    return len(found.token_ids)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_greedy_requests_get_what_they_get_without_drafts(scheme):
    engine = random_engine("small", scheme)
    prompts = [[(7 + 3 * i * j) % 4000 for j in range(30 * i + 2)] for i in range(8)]
    params = SamplingParams(max_tokens=60, ignore_eos=True, logprobs=5)
    wanted = engine.generate(prompts, params)
    drafted(engine, wanted, 0.8, 5)
    found = engine.generate(prompts, params)
    equal = [same_as_far_as_ties(*pair) for pair in zip(found, wanted, strict=True)]
    assert sum(equal) > 0.15 * 60 * len(prompts)  # logits of random weights often nearly tie
    assert engine.speculation is not None
    assert engine.speculation.accepted.sum() > 0.4 * sum(equal)
    engine.check_integrity()


@pytest.mark.parametrize(
    ("scheme", "depth"),
    [("float", 1)] + [(scheme, depth) for scheme in ("w4c8", "a8w8c8") for depth in (1, 2, 3)],
)
def test_drafts_of_one_request_see_each_other(scheme, depth):
    """Hopper runs blocks of so few rows with their attention in one kernel."""
    engine = random_engine("small", scheme)
    prompts = [[(7 + 3 * j) % 4000 for j in range(40)]]
    params = SamplingParams(max_tokens=60, ignore_eos=True, logprobs=5)
    wanted = engine.generate(prompts, params)
    drafted(engine, wanted, 0.8, depth)
    equal = same_as_far_as_ties(engine.generate(prompts, params)[0], wanted[0])
    assert engine.speculation is not None
    assert engine.speculation.accepted.sum() > 0.2 * equal


@pytest.mark.parametrize("scheme", ["float", "a8w8c8"])
def test_sampled_requests_keep_their_random_numbers(scheme):
    """Drafts of a draw that was recorded come as often as they were right."""
    engine = random_engine("small", scheme, max_batch_size=4)
    params = [
        SamplingParams(max_tokens=80, ignore_eos=True, temperature=0.9, seed=i, top_k=50 * (i % 2))
        for i in range(4)
    ]
    prompts = [[i + 1] * 9 for i in range(4)]
    wanted = engine.generate(prompts, params)
    drafted(engine, wanted, 1.0, 4)
    found = engine.generate(prompts, params)
    assert engine.speculation is not None
    counts = [
        next(
            (i for i, (a, b) in enumerate(zip(x.token_ids, y.token_ids, strict=True)) if a != b), 80
        )
        for x, y in zip(found, wanted, strict=True)
    ]
    assert sum(counts) > 80
    assert engine.speculation.accepted.sum() >= 0.7 * sum(counts)


def test_warming_up_tells_the_time_of_captured_steps():
    """And leaves nothing behind: what comes is what comes without."""
    engine = random_engine("small", "a8w8c8")
    params = SamplingParams(max_tokens=40, ignore_eos=True, logprobs=2)
    wanted = engine.generate([[5 + i] * 40 for i in range(3)], params)
    drafted(engine, wanted, 0.7, None)
    engine.warm_up()
    assert engine.speculation is not None
    told = engine.speculation._plain._measured
    assert 1e-5 < told[1] < told[64] < 0.1
    found = engine.generate([[5 + i] * 40 for i in range(3)], params)
    assert sum(same_as_far_as_ties(*pair) for pair in zip(found, wanted, strict=True)) > 40


def test_a_step_gives_a_request_several_tokens():
    engine = random_engine("small", "a8w8c8")
    params = SamplingParams(max_tokens=31, ignore_eos=True, logit_bias={7: 100.0})
    (wanted,) = engine.generate([[5] * 40], params)
    assert wanted.token_ids == [7] * 31
    drafted(engine, [wanted], 1.0, 5)
    name, gained = engine.add_request([5] * 40, params), []
    while engine.has_unfinished:
        gained.append(engine.advance().names.count(name))
    assert [count for count in gained if count] == [1, 6, 6, 6, 6, 6]


def test_constrained_requests_have_a_mask_behind_each_draft():
    pytest.importorskip("xgrammar")
    schema = {"type": "array", "items": {"enum": ["red", "blue"]}, "minItems": 2, "maxItems": 4}
    constraint = Constraint.json_schema(schema)
    params = [
        SamplingParams(max_tokens=200, constraint=constraint, temperature=0.9 * (i % 2), seed=i)
        for i in range(4)
    ]
    sizes = EngineConfig(max_model_len=512)
    engine = Engine.from_pretrained(TINY, device="cuda", config=sizes)
    wanted = engine.generate(["def add(a, b):"] * 4, params)
    drafted(engine, wanted, 0.7, 4)
    for output in engine.generate(["def add(a, b):"] * 4, params):
        assert output.finish_reason == "stop"
        assert set(json.loads(output.text)) <= {"red", "blue"}
    assert engine.speculation is not None
    assert engine.speculation.accepted.sum() > 3


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_methods_that_read_text_draft(method):
    config = EngineConfig(speculate=SpeculateConfig(method=method, depth=4), max_model_len=512)
    engine = Engine.from_pretrained(TINY, device="cuda", config=config)
    text = "def area(width, height):\n    return width * height\n\n\n" * 3
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    for _ in range(2):
        engine.generate([text], params)
    assert engine.speculation is not None
    assert engine.speculation.accepted.sum() > 10


HEAD = TINY.parent / "tiny-python-eagle"
NETWORKS = {"eagle": str(HEAD), "draft": str(TINY)}


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("method", sorted(NETWORKS))
def test_networks_draft(method, invariant):
    """Behind prompts, what is found in the cache, and sequences that gave way; sampled, too."""
    text = (TINY.parents[1] / "inference" / "engine.py").read_text()
    prompts = [text[900 * i : 900 * i + 300 * (i % 4) + 30] for i in range(12)]
    params = [
        SamplingParams(max_tokens=70, ignore_eos=True, temperature=0.7 * (i % 3 == 2), seed=i)
        for i in range(12)
    ]
    sizes = {"max_model_len": 512, "max_batch_size": 8, "kv_blocks": 36, "invariant": invariant}
    plain = Engine.from_pretrained(TINY, device="cuda", config=EngineConfig(**sizes))
    wanted = plain.generate(prompts, params)
    own = SpeculateConfig(method=method, path=NETWORKS[method], depth=4)
    config = EngineConfig(**sizes, speculate=own)
    engine = Engine.from_pretrained(TINY, device="cuda", config=config)
    for _ in range(2):
        found = engine.generate(prompts, params)
        same = [a.token_ids == b.token_ids for a, b in zip(found, wanted, strict=True)]
        assert all(same) if invariant else sum(same) > 6
    drafts = engine.speculation
    assert drafts is not None
    assert drafts.accepted.sum() > (0.9 if method == "draft" else 0.3) * drafts.proposed.sum()
    assert drafts.steps > 100
    engine.check_integrity()


def test_captured_chains_draft_what_eager_ones_do():
    text = (TINY.parents[1] / "inference" / "engine.py").read_text()
    prompts, drafts = [text[i : i + 90 * i % 700 + 5] for i in range(6)], []
    own = SpeculateConfig(method="eagle", path=str(HEAD), depth=5)
    for eager in (False, True):
        config = EngineConfig(max_model_len=1024, speculate=own, eager=eager, invariant=True)
        engine = Engine.from_pretrained(TINY, device="cuda", config=config)
        engine.generate(prompts, SamplingParams(max_tokens=60, ignore_eos=True))
        assert engine.speculation is not None
        drafts.append(engine.speculation.accepted.tolist())
    assert drafts[0] == pytest.approx(drafts[1], rel=0.03)
