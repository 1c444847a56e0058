"""What requests have computed is found by others, who get the same tokens to the bit."""

from __future__ import annotations

import math

import pytest
import torch

from formats.errors import EngineError
from formats.scheme import KVCacheSpec
from inference.engine import Engine
from inference.models.kv_cache import CacheShape, LayerCache, copy_blocks
from inference.requests.request import SamplingParams
from tests.inference.engines import engine_of as tiny_engine
from tests.inference.engines import finish, ids

KINDS = {
    "float": None,
    "int8": KVCacheSpec(),
    "fp8": KVCacheSpec(dtype="fp8_e4m3"),
    "per_channel": KVCacheSpec(granularity="per_channel"),
    "dynamic": KVCacheSpec(granularity="per_token_head"),
    "dynamic_fp8": KVCacheSpec(dtype="fp8_e4m3", granularity="per_token_head"),
    "int4": KVCacheSpec(dtype="int4"),
    "dynamic_int4": KVCacheSpec(dtype="int4", granularity="per_token_head", rotate_keys=True),
    "k8v4": KVCacheSpec(value_dtype="int4", granularity="per_token_head"),
}
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=3)


def engine_of(folder, kind: str = "float", **config) -> Engine:
    """An engine whose cache is of some kind, with made-up static scales."""
    engine = tiny_engine(folder, **config)
    spec, shape = KINDS[kind], engine.model.config
    heads, dim = shape.kv_heads, shape.head_dim
    static = None
    if spec is not None and not spec.dynamic:
        sizes = [spec.scale_shape(role, heads, dim) for role in ("k_cache", "v_cache")]
        k, v = (torch.linspace(0.03, 0.04, math.prod(size)).view(size) for size in sizes)
        static = k, v
    blocks, turn = engine.stats().total, dim if spec is not None and spec.rotate_keys else 0
    cache = CacheShape(blocks, [LayerCache(own, static, spec, turn) for own in shape.cached])
    return engine.variant(engine.model.layers, engine.backend.cache(cache))


def answer(engine: Engine, prompt: list[int], params: SamplingParams = PARAMS):
    output = engine.generate([prompt], params)[0]
    engine.check_integrity()
    return output.token_ids, output.logprobs, output.prompt_logprobs


def hits(engine: Engine, prompt: list[int]) -> int:
    """How many tokens of a prompt are found."""
    before = engine.stats().hit_tokens
    answer(engine, prompt)
    return engine.stats().hit_tokens - before


@pytest.mark.parametrize("kind", KINDS)
def test_a_hit_gives_the_bits_of_a_miss(tiny_llama, kind):
    warm, cold = (engine_of(tiny_llama, kind, prefix_cache=on) for on in (True, False))
    system = ids(150)
    prompts = [system, [*system[:140], *ids(60, 1)], system[:129], [*system, *ids(250, 2)]]
    for prompt in prompts:
        assert answer(warm, prompt) == answer(cold, prompt)
    assert warm.stats().hit_tokens == 128 + 128 + 128
    assert cold.stats().hit_tokens == 0
    turn = [*prompts[3], *answer(warm, prompts[3])[0], *ids(20, 3)]  # of a chat, the next one
    before = warm.stats().hit_tokens
    assert answer(warm, turn) == answer(cold, turn)
    assert warm.stats().hit_tokens - before == 384


def test_several_answers_to_one_prompt_compute_it_once(tiny_llama):
    """What `n` of the OpenAI schema asks for, and who has the same system prompt."""
    prompt, each = (
        ids(300),
        [PARAMS.model_copy(update={"seed": i, "temperature": 1.0}) for i in range(4)],
    )
    engine, cold = (engine_of(tiny_llama, prefix_cache=on) for on in (True, False))
    found, wanted = (e.generate([prompt] * 4, each) for e in (engine, cold))
    assert [o.token_ids for o in found] == [o.token_ids for o in wanted]
    assert [o.logprobs for o in found] == [o.logprobs for o in wanted]
    assert engine.stats().hit_tokens == 3 * 256


@pytest.mark.parametrize("chunk", [7, 64, 100])
def test_how_a_prompt_was_cut_changes_no_bit(tiny_llama, chunk):
    """What is cached was computed in one company, and is used in another."""
    whole = engine_of(tiny_llama, "dynamic")
    cut = engine_of(tiny_llama, "dynamic", max_batched_tokens=chunk)
    for seed in (0, 0, 1):
        prompt = [*ids(200), *ids(30, seed)]
        assert answer(whole, prompt) == answer(cut, prompt)
    for mine, other in zip(whole.pools, cut.pools, strict=True):
        for name in ("k", "v", "k_scale", "v_scale"):
            assert torch.equal(getattr(mine, name)[:3], getattr(other, name)[:3])


def test_generated_tokens_are_found_by_the_next_turn(tiny_llama):
    engine = engine_of(tiny_llama)
    prompt = ids(100)
    made = answer(engine, prompt, PARAMS.model_copy(update={"max_tokens": 60}))[0]
    assert hits(engine, [*prompt, *made, *ids(5)]) == 128


def test_an_abort_keeps_what_was_computed(tiny_llama):
    engine = engine_of(tiny_llama, max_batched_tokens=70)
    prompt = ids(400)
    name = engine.add_request(prompt, PARAMS)
    for _ in range(3):
        engine.step()
    engine.abort(name)
    engine.check_integrity()
    assert engine.stats().used == 0
    assert hits(engine, prompt) == 192  # of 210


def test_a_preempted_request_finds_what_it_had_computed(tiny_llama):
    params = PARAMS.model_copy(update={"max_tokens": 100})
    wanted = [answer(engine_of(tiny_llama), ids(60, seed), params) for seed in range(2)]
    engine = engine_of(tiny_llama, kv_blocks=4, max_model_len=200)
    names = [engine.add_request(ids(60, seed), params) for seed in range(2)]
    found = finish(engine)
    assert [(found[n].token_ids, found[n].logprobs, None) for n in names] == wanted
    stats = engine.stats()
    assert stats.preemptions == 1
    assert stats.hit_tokens > 0


def test_who_wants_the_prompts_log_probabilities_computes_it(tiny_llama):
    engine = engine_of(tiny_llama)
    prompt, params = ids(150), PARAMS.model_copy(update={"prompt_logprobs": 2})
    wanted = answer(engine, prompt, params)
    assert answer(engine, prompt, params) == wanted
    assert engine.stats().hit_tokens == 0
    assert wanted[2] is not None
    assert len(wanted[2]) == 150
    assert hits(engine, prompt) == 128


def test_models_that_share_a_cache_find_only_what_they_computed(tiny_llama, make_model):
    engine = engine_of(tiny_llama)
    other = tiny_engine(make_model("llama", seed=5))
    twin = engine.variant(other.model.layers, engine.pools)
    prompt = ids(200)
    wanted = answer(engine, prompt)
    theirs = answer(twin, prompt)
    assert twin.stats().hit_tokens == 0
    assert theirs[1] != wanted[1]
    assert answer(engine, prompt) == wanted
    assert engine.stats().hit_tokens == 192


def test_nothing_of_logits_that_are_not_finite_is_found(tiny_llama):
    engine, prompt = engine_of(tiny_llama, kv_blocks=8), ids(300)
    good, broken = [t for t in ids(120, 9) if t != prompt[100]][:90], prompt
    wanted = answer(engine, good)
    row = engine.model.embedding[prompt[100]].clone()
    engine.model.embedding[prompt[100]] = float("nan")
    assert engine.generate([broken], PARAMS)[0].finish_reason == "error"
    engine.check_integrity()
    name = engine.add_request(broken, PARAMS.model_copy(update={"max_tokens": 1}))
    engine.abort(name)
    assert answer(engine, good) == wanted
    engine.model.embedding[prompt[100]] = row
    assert hits(engine, broken) == 0
    assert answer(engine, good) == wanted


def test_what_an_aborted_request_may_have_spoilt_harms_no_other(tiny_llama):
    engine, prompt = engine_of(tiny_llama, kv_blocks=8, max_batched_tokens=300), ids(400)
    wanted = answer(engine, ids(290, 1))
    engine.model.embedding[prompt[5]] = float("nan")
    name = engine.add_request(prompt, PARAMS)
    engine.step()
    engine.abort(name)
    assert engine.stats().cached >= 4
    for _ in range(3):
        assert answer(engine, ids(290, 1)) == wanted
    assert engine.score(ids(400, 4)).isfinite().all() or prompt[5] in ids(400, 4)


def test_a_failed_step_leaves_nothing_to_be_found(tiny_llama, monkeypatch):
    engine, prompt = engine_of(tiny_llama, max_batched_tokens=100), ids(300)
    wanted = answer(engine, prompt)
    name = engine.add_request([*ids(150, 7), *prompt])
    engine.step()
    monkeypatch.setattr(engine.loop, "forward", lambda *_: 1 / 0)
    with pytest.raises(EngineError, match="ZeroDivisionError"):
        engine.step()
    monkeypatch.undo()
    engine.check_integrity()
    assert engine.abort(name) is None
    assert engine.stats().cached == engine.stats().used == 0
    assert answer(engine, prompt) == wanted
    assert engine.stats().hit_tokens == 0


@pytest.mark.parametrize("kind", KINDS)
def test_copies_of_blocks_are_the_bits_of_their_sources(tiny_llama, kind):
    engine = engine_of(tiny_llama, kind, kv_blocks=8)
    answer(engine, ids(400))
    before = [{n: getattr(p, n).clone() for n in ("k", "v")} for p in engine.pools]
    copy_blocks(engine.pools, [(0, 1), (1, 7), (2, 3)])
    for pool, old in zip(engine.pools, before, strict=True):
        for name, numbers in old.items():
            found, wanted = getattr(pool, name), numbers[[0, 0, 2, 2, 4, 5, 6, 1]]
            assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))
        if pool.dynamic and pool.k_scale is not None and pool.v_scale is not None:
            assert torch.equal(pool.k_scale[1], pool.k_scale[0])
            assert not (pool.v_scale[3] == 1).all()
    copy_blocks(engine.pools, [])
