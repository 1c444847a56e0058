"""Models that keep a recurrent state beside K and V, or in their place, in our engine."""

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from formats.errors import EngineError
from inference.beam_search import BeamParams, beam_search
from inference.config import EngineConfig, SpeculateConfig
from inference.engine import Engine
from inference.requests.request import SamplingParams
from inference.scheduling.states import StateRows
from inference.speculate.counts import DraftCounts
from inference.transformers_code.model import CodeModel
from inference.transformers_code.state import Stateful, at_once
from tests.conftest import write_random
from tests.families import check_engine
from tests.inference.speculate.requests import Replay
from tests.tiny_models import tiny_config

KINDS = ("qwen3_next", "lfm2", "bamba", "jamba", "mamba2")  # rules of state, with attention and not
ALL = (*KINDS, "falcon_h1", "falcon_mamba", "granitemoehybrid", "mamba", "nemotron_h")
ALL += ("kimi_linear", "olmo_hybrid", "qwen3_5_text", "minimax", "zamba2", "zaya")
MANY = int(os.environ.get("PTQ_STATE_REQUESTS", "200"))
SMALL = {
    "chunk_size": 16,
    "mamba_chunk_size": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
}
GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Folders of tiny models, each written once."""
    found: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in found:
            found[kind] = write_small(kind, tmp_path_factory.mktemp(kind))
        return found[kind]

    return make


def write_small(kind: str, folder: Path) -> Path:
    """A tiny model of a kind."""
    config = tiny_config(kind)
    for name, value in SMALL.items():
        if hasattr(config, name):
            setattr(config, name, value)
    if hasattr(config, "linear_value_head_dim"):
        config.linear_value_head_dim = 16
    return write_random(folder / "float", config)


def ids_of(count: int, seed: int = 1) -> list[int]:
    return torch.randint(1, 384, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def engine_of(folder, **config) -> Engine:
    sizes: dict[str, Any] = {
        "max_batched_tokens": 80,
        "max_batch_size": 4,
        "max_model_len": 384,
    } | config
    return Engine.from_pretrained(folder, config=EngineConfig(**sizes))


@pytest.mark.parametrize("kind", ALL)
def test_logits_and_tokens_are_those_of_transformers(made, kind):
    for step in (16, 40, 512):
        ids = torch.tensor(ids_of(75))
        check_engine_of_steps(made(kind), ids, step)


def check_engine_of_steps(folder, ids, step):
    from tests.families import distance, transformers_logits

    if step == 16:
        check_engine(folder, ids).check_integrity()
        return
    engine = engine_of(folder, max_batched_tokens=step)
    assert distance(engine.score(ids), transformers_logits(folder, ids)) < 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_a_hit_has_the_bits_of_a_miss(made, kind):
    engine, prompt = engine_of(made(kind), max_batched_tokens=200), ids_of(210)
    params = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=3)
    first, again = (engine.generate([prompt], params)[0] for _ in range(2))
    assert engine.stats().hit_tokens == 192
    assert (first.token_ids, first.logprobs) == (again.token_ids, again.logprobs)
    cut = engine_of(made(kind), max_batched_tokens=70, prefix_cache=False)
    assert cut.generate([prompt], params)[0].logprobs == first.logprobs
    engine.check_integrity()


def test_a_beginning_is_found_from_the_third_request_on(made):
    """The second computes it again, and keeps the state where it first differs from the first."""
    engine, beginning = engine_of(made("bamba")), ids_of(130)
    for i, hits in enumerate((0, 0, 128)):
        prompt = beginning + ids_of(100, seed=i + 10)
        assert engine.generate([prompt], GREEDY)[0].token_ids
        assert engine.stats().hit_tokens == hits


@pytest.mark.parametrize("kind", ["jamba", "granitemoehybrid"])
def test_routers_give_a_token_the_same_bits_in_any_company(made, kind):
    """Their code calls torch, whose sums would depend on the number of rows."""
    engine = engine_of(made(kind), prefix_cache=False, max_batched_tokens=300, max_batch_size=8)
    prompts = [ids_of(n, seed=n) for n in (3, 64, 65, 100)]
    params = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=2)
    together = [out.logprobs for out in engine.generate(prompts, params)]
    assert together == [engine.generate([p], params)[0].logprobs for p in prompts]


@pytest.mark.parametrize("kind", KINDS)
def test_random_requests_are_each_as_alone(made, kind):
    """With chunks, hits, preemption, aborts and few snapshots."""
    rng = random.Random(7)
    engine = engine_of(made(kind), kv_blocks=9, state_snapshots=5, max_batched_tokens=70)
    alone = engine_of(made(kind), prefix_cache=False, max_batch_size=1, max_batched_tokens=64)
    beginnings = [ids_of(n, seed=n) for n in (64, 128, 150)]
    wanted: dict[str, tuple[list[int], SamplingParams]] = {}
    done: dict[str, list[int]] = {}
    left = max(1, MANY // len(KINDS))
    while left or engine.has_unfinished:
        if left and rng.random() < 0.5:
            left -= 1
            prompt = rng.choice(beginnings)[: rng.choice((64, 100, 150))]
            prompt = prompt + ids_of(rng.randrange(0, 60), seed=rng.randrange(12)) + [1]
            params = SamplingParams(
                max_tokens=rng.randrange(1, 60),
                ignore_eos=True,
                temperature=rng.choice((0.0, 0.9)),
                seed=rng.randrange(100),
            )
            wanted[engine.add_request(prompt, params)] = prompt, params
        if wanted and rng.random() < 0.02:
            engine.abort(rng.choice(list(wanted)))
        done |= {
            out.request_id: list(out.token_ids)
            for out in engine.step()
            if out.finished and out.finish_reason == "length"
        }
        engine.check_integrity()
    assert engine.stats().preemptions > 0
    assert engine.stats().hit_tokens > 0
    assert len(done) > len(wanted) / 2
    some = rng.sample(sorted(done), max(1, len(done) // 2)) if MANY <= 200 else sorted(done)
    for name in some:
        prompt, params = wanted[name]
        assert list(alone.generate([prompt], params)[0].token_ids) == done[name]


@pytest.mark.parametrize("kind", KINDS)
def test_beams_take_a_copy_of_the_state(made, kind):
    prompt, params = ids_of(70), BeamParams(beam_width=3, max_tokens=6)
    engine, other = engine_of(made(kind)), engine_of(made(kind), max_batched_tokens=512)
    (beams,) = beam_search(engine, [prompt], params)
    (again,) = beam_search(other, [prompt], params)
    assert [beam.token_ids for beam in beams] == [beam.token_ids for beam in again]
    for beam in beams:
        logits = other.score([*prompt, *beam.token_ids])[len(prompt) - 1 : -1]
        picked = logits.log_softmax(-1).gather(1, torch.tensor(beam.token_ids)[:, None])
        assert picked.sum().item() == pytest.approx(beam.cumulative_logprob, abs=1e-3)
    engine.check_integrity()


def test_next_tokens_of_several_sequences_are_computed_at_once(made, monkeypatch):
    """Also where the states of their prompts were kept."""
    pieces: list[int] = []
    run = Stateful._run

    def counting(self, x, piece, given):
        pieces.append(len(piece.rows))
        return run(self, x, piece, given)

    monkeypatch.setattr(Stateful, "_run", counting)
    engine_of(made("lfm2")).generate([ids_of(n) for n in (70, 20, 5)], GREEDY)
    assert max(pieces) == 3


def test_states_count_in_the_memory(made):
    few, many = (engine_of(made("lfm2"), state_snapshots=n) for n in (0, 10))
    assert 6 * many.state_bytes == 16 * few.state_bytes > 0  # of 6 rows without, 16 with


def test_memory_that_is_too_small_for_states_is_named(made, monkeypatch):
    def none_left(*_):
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr(CodeModel, "keep_states", none_left)
    with pytest.raises(EngineError, match=r"15 rows of recurrent states.*state_snapshots"):
        engine_of(made("lfm2"), state_snapshots=10)


@pytest.mark.parametrize("kind", ["qwen3_next", "lfm2", "jamba", "mamba2"])
def test_drafts_change_no_token(made, kind):
    """Some are right and some wrong; blocks are few, so that sequences are computed again."""
    prompts = [ids_of(n, seed=n) for n in (70, 20, 5, 130)]
    params = [
        SamplingParams(max_tokens=70, ignore_eos=True, temperature=t, seed=1)
        for t in (0, 0.9, 0, 1)
    ]
    plain = engine_of(made(kind)).generate(prompts, params)
    drafts = SpeculateConfig(method="ngram", depth=5)
    engine = engine_of(made(kind), kv_blocks=6, speculate=drafts)
    outputs = [[*prompt, *out.token_ids] for prompt, out in zip(prompts, plain, strict=True)]
    engine.speculate_by(Replay(outputs, 0.7, 384), depth=5)
    found = engine.generate(prompts, params)
    assert [out.token_ids for out in found] == [out.token_ids for out in plain]
    engine.check_integrity()
    counts = DraftCounts.of(engine.speculation)
    assert 0 < sum(counts.accepted) < sum(counts.proposed)
    assert kind == "mamba2" or engine.stats().preemptions > 0  # it needs no blocks


@pytest.mark.parametrize("draft", ["llama", "lfm2", "mamba2"])
def test_a_draft_model_with_states_or_without_changes_no_token(made, tiny_llama, draft):
    path = tiny_llama if draft == "llama" else made(draft)
    prompts = [ids_of(n, seed=n) for n in (70, 20, 5)]
    params = [
        SamplingParams(max_tokens=12, ignore_eos=True, temperature=t, seed=1) for t in (0, 0.9, 0)
    ]
    own = SpeculateConfig(method="draft", path=str(path), depth=2)
    engine, plain = engine_of(made("lfm2"), speculate=own), engine_of(made("lfm2"))
    found, wanted = (one.generate(prompts, params) for one in (engine, plain))
    assert [out.token_ids for out in found] == [out.token_ids for out in wanted]
    assert sum(DraftCounts.of(engine.speculation).proposed) > 20


def test_states_of_drafts_are_kept_in_rows_of_their_own():
    states = StateRows(places=3, snapshots=2, piece=64, drafts=4)
    states.want(0, [64])
    states.keep_before([(0, 11, 3), (2, 7, 1)])
    assert states.rows == 9
    kept = [[states.before_draft(place, n) for n in (7, 11, 12, 13)] for place in range(3)]
    assert kept == [[None, 3, 4, 5], [None] * 4, [6, None, None, None]]
    assert states.keeping == [0]
    states.go_back(0, 12)  # the first one was right
    states.go_back(2, 8)  # all were: what is in its place is right
    states.go_back(2, 7)  # and is not asked again
    assert states.take_copies() == [(4, 0)]
    states.keep_before([(0, 13, 2)])
    states.give_up(0)
    states.go_back(0, 13)
    assert states.take_copies() == []
    assert states.adds_up()


def test_copies_are_those_that_one_after_the_other_gives():
    rng = random.Random(3)
    for _ in range(200):
        pairs = [(rng.randrange(6), rng.randrange(6)) for _ in range(rng.randrange(8))]
        wanted, found = torch.arange(6), torch.arange(6)
        for source, target in pairs:
            wanted[target] = wanted[source]
        for some in at_once(pairs):
            sources, targets = torch.tensor(some).T
            found[targets] = found[sources]
        assert found.tolist() == wanted.tolist()
    assert len([*at_once([(9, 0), (7, 1), (8, 2)])]) == 1


def test_rows_for_drafts_may_be_those_of_snapshots():
    states = StateRows(places=3, snapshots=4, piece=64)
    states.want(0, [64])
    (_, row), *_ = states.taken(0, 64)
    states.note(7, row)
    assert 7 in states
    states.reserve(3)
    assert states.drafts == 3
    assert 7 in states  # free rows go first
    states.reserve(9)
    assert states.drafts == 4
    assert 7 not in states
    states.want(0, [64])
    assert states.keeping == []
    assert states.adds_up()


def test_drafts_without_room_for_states_are_refused_by_name(made):
    engine = engine_of(made("lfm2"), state_snapshots=0)
    with pytest.raises(EngineError, match=r"no rows for recurrent states.*speculate=\.\.\."):
        engine.speculate_by(Replay([], 1, 384))
