"""A draft model: no token changes, and what it drafts does not depend on what was cached when."""

import json
import shutil

import numpy as np
import pytest
import torch

from formats.errors import CheckpointError, EngineError
from inference.engine import Engine
from inference.requests.request import SamplingParams
from inference.scheduling.batch import RunningBatch
from inference.scheduling.sequence import Sequence
from inference.speculate.chain import CachedTokens, ChainProposer, Target
from inference.speculate.methods.draft import draft_proposer
from tests.families import but_in_ci
from tests.inference.engines import drafting
from tests.inference.speculate.requests import (
    fork_within,
    request_count,
    run_all,
    some_requests,
    spied,
)
from tests.inference.transformers_code.test_states import write_small

LONG = SamplingParams(max_tokens=50, ignore_eos=True)
DRAWN = [
    SamplingParams(max_tokens=30, ignore_eos=True, temperature=1.1, **own)
    for own in ({}, {"top_k": 9}, {"top_p": 0.8, "seed": 5}, {"min_p": 0.02, "logprobs": 2})
]
STATEFUL = ("qwen3_next", "mamba2")
PROMPTS = [[5 + i] * 45 + [9 + 3 * i] * i for i in range(4)]


def engine(folder, draft=None, depth=4, **config) -> Engine:
    return drafting(folder, draft and "draft", draft, depth, **config)


def proposer_of(runner: Engine) -> ChainProposer:
    return runner.speculation.proposer  # pyright: ignore[reportReturnType]


def acceptance(runner: Engine) -> float:
    """Share of drafts that came since it was last asked."""
    own = runner.speculation
    share = own.accepted.sum() / own.proposed.sum()
    own.accepted[:], own.proposed[:] = 0, 0
    return float(share)


@pytest.mark.parametrize(
    "scheme", ["float", "a8w8c8", "a8w4c4_two_level", *but_in_ci(STATEFUL, "mamba2")]
)
def test_a_model_that_drafts_for_itself_is_always_right(
    tiny_llama, make_quantized, tmp_path, scheme
):
    """Also behind what it finds, in blocks that others had, and after a sequence gave way."""
    stateful = scheme in STATEFUL
    folder = write_small(scheme, tmp_path) if stateful else make_quantized(tiny_llama, scheme)
    want = [list(o.token_ids) for o in engine(folder).generate(PROMPTS, LONG)]
    runner = engine(folder, folder, max_batch_size=3, max_model_len=192, max_batched_tokens=50)
    assert [o.token_ids for o in runner.generate(PROMPTS, LONG)] == want
    assert acceptance(runner) == 1
    runner.generate(PROMPTS, DRAWN)  # guessed with the same noise
    assert acceptance(runner) == 1
    for _ in range(2):  # of what a model with a state made itself, nothing is found
        runner.generate([[*p, *o, 7] for p, o in zip(PROMPTS, want, strict=True)], LONG)
    assert runner.stats().hit_tokens > 0
    assert acceptance(runner) == 1

    tight = engine(folder, folder, kv_blocks=3, max_model_len=192)
    for _ in range(2):
        assert [o.token_ids for o in tight.generate(PROMPTS, LONG)] == want
        assert acceptance(tight) == 1
    assert tight.stats().preemptions > 0


def test_what_is_found_but_was_never_drafted_for_is_computed(tiny_llama):
    """A prompt whose request ended with its first token, and tokens of beams."""
    runner = engine(tiny_llama, tiny_llama)
    runner.generate(PROMPTS, LONG)  # blocks hold something else
    prompt = [*range(20, 140)]
    runner.generate([prompt], SamplingParams(max_tokens=1))
    fork_within(runner, prompt)
    acceptance(runner)
    hits = runner.stats().hit_tokens
    runner.generate([prompt, [*prompt, *range(30, 39), 32, 39, 40]], LONG)
    assert runner.stats().hit_tokens > hits
    assert acceptance(runner) == 1


@pytest.mark.parametrize("kind", ["qwen3", *STATEFUL])
def test_another_model_changes_nothing(make_model, tiny_llama, tmp_path, kind):
    """Greedy and sampled, with hits, preemption and aborts; of most drafts some are wrong."""
    requests = some_requests(request_count(24), seed=4)
    runner = engine(tiny_llama, max_batch_size=3, kv_blocks=12, max_model_len=256)
    wanted = run_all(runner, requests)
    stateful = kind in STATEFUL
    draft = write_small(kind, tmp_path) if stateful else make_model(kind, layers=1, seed=3)
    target = Target(
        runner.tokenizer, 384, runner.config, runner.backend, runner.model, runner.checkpoint
    )
    runner.speculate_by(draft_proposer(str(draft), target), depth=3)
    assert run_all(runner, requests) == wanted
    assert acceptance(runner) < 1


def test_models_of_transformers_code_draft(tiny_llama):
    config = {"transformers_code": True, "max_batched_tokens": 20}
    runner = engine(tiny_llama, tiny_llama, **config)
    want = engine(tiny_llama, **config).generate(PROMPTS, LONG)
    assert [o.token_ids for o in runner.generate(PROMPTS, LONG)] == [o.token_ids for o in want]
    assert acceptance(runner) == 1


def test_nothing_is_drafted_behind_the_last_position(make_model, tiny_llama):
    draft = make_model("llama", max_position_embeddings=64)
    runner = engine(tiny_llama, draft, depth=20)
    seen = spied(runner)
    (got,) = runner.generate([[5] * 40], LONG)
    assert got.token_ids == engine(tiny_llama).generate([[5] * 40], LONG)[0].token_ids
    assert (
        max(len(text) + len(drafts) for text, drafts in seen if drafts) == 65
    )  # the last position gives one more token


def test_logits_that_are_not_finite_draft_nothing_and_leave_nothing(tiny_llama):
    runner = engine(tiny_llama, tiny_llama)
    draft = proposer_of(runner)
    network = draft._chain._network
    forward = network._forward

    def broken(batch):
        logits = forward(batch)
        for pool in draft._pools:
            pool.v.view(-1)[:] = torch.nan
        return torch.full_like(logits, torch.nan)

    network._forward = broken
    want = engine(tiny_llama).generate(PROMPTS[:1], LONG)
    assert runner.generate(PROMPTS[:1], LONG)[0].token_ids == want[0].token_ids
    assert runner.speculation.proposed.sum() == 0
    network._forward = forward
    for pool in draft._pools:  # as if no other block had ever been written
        pool.v[2:] = 0
    runner.generate(PROMPTS[:1], LONG)
    assert acceptance(runner) == 1


def test_other_vocabularies_are_refused(make_model, tiny_llama, tmp_path):
    smaller = make_model("llama", vocab_size=320)
    with pytest.raises(EngineError, match=r"320 and 384 logits, and their tokenizer has tokens up"):
        engine(tiny_llama, smaller)
    other = shutil.copytree(tiny_llama, tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    names = {number: text for text, number in vocabulary.items()}
    vocabulary[names[40]], vocabulary[names[50]] = 50, 40
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(EngineError, match=r"token 40 is .* to it and .* to the model"):
        engine(tiny_llama, other)
    with pytest.raises(CheckpointError, match="nowhere"):
        engine(tiny_llama, tmp_path / "nowhere")


def test_padding_of_a_vocabulary_may_differ(make_model, tiny_llama):
    """Also where the target is asked to go on with an id that is padding."""
    wide = make_model("llama", vocab_size=448)
    prompts = [[5, 447, 6]]
    for target, draft in ((wide, tiny_llama), (tiny_llama, wide)):
        asked = prompts if target is wide else [[5, 6]]
        want = engine(target).generate(asked, LONG)[0].token_ids
        assert engine(target, draft).generate(asked, LONG)[0].token_ids == want


def test_a_draft_model_that_does_not_fit_is_named(tiny_llama, monkeypatch):
    monkeypatch.setattr("inference.cpu.backend.available_bytes", lambda: 1000)
    with pytest.raises(EngineError, match=r"draft model .* needs .* 24 blocks.* Lower kv_blocks"):
        engine(tiny_llama, tiny_llama, kv_blocks=24)


class TestCachedTokens:
    @pytest.fixture
    def batch(self):
        batch = RunningBatch(2)
        for name, table in (("a", [3, 1]), ("b", [3, 2])):
            place = batch.enter(Sequence(name, [*range(1, 101)]))
            batch.set_table(place, table)
        return batch

    def write(self, cached, batch, place, start, end):
        which = np.array([place]), np.array([start]), np.array([end])
        cached.begin(batch, *which)
        cached.finish(batch, *which)

    def test_is_told_as_far_as_the_text_goes(self, batch):
        cached, both = CachedTokens(4, 2, 128), np.array([0, 1])
        assert cached.count(batch, both).tolist() == [0, 0]
        self.write(cached, batch, 0, 0, 100)
        assert cached.count(batch, both).tolist() == [99, 64]  # the last one's logits are wanted
        batch.ids[0, 70] = 999
        assert cached.count(batch, both).tolist() == [70, 64]
        self.write(cached, batch, 1, 64, 74)
        assert cached.count(batch, both).tolist() == [70, 74]

    def test_another_block_at_the_end_is_noticed(self, batch):
        cached, first = CachedTokens(4, 2, 128), np.array([0])
        self.write(cached, batch, 0, 0, 100)
        batch.set_table(0, [3, 0])  # a copy, which the other cache did not make
        assert cached.count(batch, first).tolist() == [64]

    def test_another_beginning_is_another_text(self, batch):
        """The same tokens at the same positions, behind others."""
        cached, both = CachedTokens(4, 2, 128), np.array([0, 1])
        batch.ids[1, 0] = 999
        batch.set_table(1, [2, 1])
        self.write(cached, batch, 0, 0, 100)
        self.write(cached, batch, 1, 0, 64)
        assert cached.count(batch, both).tolist() == [99, 64]

    def test_what_is_being_written_is_not_told(self, batch):
        cached, first = CachedTokens(4, 2, 128), np.array([0])
        self.write(cached, batch, 0, 0, 100)
        cached.begin(batch, first, np.array([80]), np.array([85]))  # and the step fails
        assert cached.count(batch, first).tolist() == [80]
        cached.forget(np.array([1]))
        assert cached.count(batch, first).tolist() == [64]
