"""Beam search: the hypotheses and scores of transformers, and no block of the cache lost."""

import pickle
import random
from pathlib import Path

import pytest
import torch

from formats.errors import EngineError, RequestError
from inference.beam_search import BeamParams, BeamSearch, Hypothesis, beam_search
from inference.engine import Engine
from inference.requests.request import SamplingParams
from inference.scheduling.blocks import BlockManager, blocks_for
from inference.scheduling.scheduler import Scheduler
from inference.scheduling.sequence import Sequence
from tests.inference.engines import engine_of
from tests.inference.logits_engine import LogitsEngine

MODES = [True, False, "never"]
DEFAULT_MODEL = Path(__file__).parents[2] / "recipes" / "tiny-python"
PROMPTS = [
    "def read_lines(path):\n",
    "class Stack:\n    def push(self, item):\n        self.items.",
    "import os\n\n\ndef list_files(folder, suffix):\n" * 6,
]


def transformers_model(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def model(tiny_llama):
    return transformers_model(tiny_llama)


@pytest.fixture(scope="module")
def default_model():
    return transformers_model(DEFAULT_MODEL)


@pytest.fixture(scope="module")
def default_engine():
    return engine_of(DEFAULT_MODEL)


@pytest.fixture(scope="module")
def logprobs(model):
    """Log probabilities behind tokens, of a model that is flat enough for hypotheses to compete."""
    known = {}

    @torch.no_grad()
    def of(tokens):
        if tuple(tokens) not in known:
            logits = model(torch.tensor([tokens])).logits[0, -1]
            known[tuple(tokens)] = torch.log_softmax(logits, dim=-1)
        return known[tuple(tokens)]

    return of


def theirs(model, prompt, params: BeamParams, ends) -> list[tuple[list[int], float]]:
    """Continuations and scores of transformers, padding removed."""
    model.generation_config.eos_token_id = sorted(ends) or None
    made = model.generate(
        torch.tensor([prompt]),
        do_sample=False,
        num_beams=params.beam_width,
        num_return_sequences=params.n,
        max_new_tokens=params.max_tokens,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        pad_token_id=next(iter(sorted(ends)), 0),
        return_dict_in_generate=True,
        output_scores=True,
    )
    found = []
    for row, used, score in zip(
        made.sequences, made.beam_indices, made.sequences_scores, strict=True
    ):
        length = int((used >= 0).sum())
        found.append((row[len(prompt) :][:length].tolist(), score.item()))
    return found


def assert_same(own: list[Hypothesis], other: list[tuple[list[int], float]]) -> None:
    assert [list(h.token_ids) for h in own] == [tokens for tokens, _ in other]
    assert [h.score for h in own] == pytest.approx([s for _, s in other], rel=1e-5, abs=1e-4)


@pytest.mark.parametrize("early_stopping", MODES)
@pytest.mark.parametrize("width", [2, 4, 8])
def test_hypotheses_and_scores_are_those_of_transformers(model, logprobs, width, early_stopping):
    prompt = [5, 6, 7]
    likely = logprobs(prompt).topk(40).indices.tolist()
    reasons = set()
    for ends in ([likely[1]], likely[3:40:6], []):  # one end token, several, none
        for penalty in (-1.0, 0.0, 1.0, 2.5):
            params = BeamParams(
                beam_width=width, n=width, max_tokens=12,
                length_penalty=penalty, early_stopping=early_stopping,
            )  # fmt: skip
            own = beam_search(engine := LogitsEngine(logprobs, ends), [prompt], params)[0]
            assert_same(own, theirs(model, prompt, params, ends))
            assert not engine.held
            reasons |= {h.finish_reason for h in own}
    assert reasons == {"stop", "length"}


def is_idle(engine: Engine) -> bool:
    """Whether every block is free or cached, and nobody is left."""
    engine.check_integrity()
    stats = engine.stats()
    return not engine.has_unfinished and stats.free + stats.cached == stats.total


@pytest.mark.parametrize(
    ("width", "early_stopping", "penalty"),
    [(2, False, 1.0), (4, True, 1.0), (4, "never", 2.0), (8, False, 0.0), (8, "never", -1.0)],
)
def test_the_default_model_gives_the_beams_of_transformers(
    default_model, default_engine, width, early_stopping, penalty
):
    ends = {0, *default_engine.tokenizer(")\n")["input_ids"]}
    params = BeamParams(
        beam_width=width, n=width, max_tokens=16, stop_token_ids=tuple(ends),
        length_penalty=penalty, early_stopping=early_stopping,
    )  # fmt: skip
    own = beam_search(default_engine, PROMPTS, params)
    assert is_idle(default_engine)
    for prompt, found in zip(PROMPTS, own, strict=True):
        tokens = default_engine.tokenizer(prompt)["input_ids"]
        assert_same(found, theirs(default_model, tokens, params, ends))


def test_log_probabilities_of_a_hypothesis_are_those_of_its_tokens(default_engine):
    prompt = default_engine.tokenizer(PROMPTS[1])["input_ids"]
    params = BeamParams(beam_width=3, n=3, max_tokens=9, logprobs=2)
    found = beam_search(default_engine, [prompt], params)[0]
    assert beam_search(default_engine, PROMPTS[1], params) == [found], "one text is one prompt"
    for one in found:
        scored = torch.log_softmax(default_engine.score([*prompt, *one.token_ids]), dim=-1)
        rows = scored[len(prompt) - 1 : -1]
        want = [row[token].item() for row, token in zip(rows, one.token_ids, strict=True)]
        assert one.logprobs is not None
        got = [told[token] for told, token in zip(one.logprobs, one.token_ids, strict=True)]
        assert got == pytest.approx(want, abs=1e-5)
        assert one.cumulative_logprob == pytest.approx(sum(want), abs=1e-4)
        likely = [row.topk(2).indices.tolist() for row in rows]
        assert [list(told)[:2] for told in one.logprobs] == likely


def drive(engine: Engine, *searches: BeamSearch, steps: int = 1000) -> int:
    """Step until searches are done; the most blocks that were used."""
    most = 0
    for _ in range(steps):
        result = engine.advance()
        most = max(most, engine.stats().used)
        for search in searches:
            search.take(result)
        if all(search.done for search in searches):
            break
    return most


def test_beams_share_the_blocks_of_what_they_have_in_common(default_engine):
    prompt, params = [7] * 300, BeamParams(beam_width=8, n=8, max_tokens=40, ignore_eos=True)
    search = BeamSearch(default_engine, prompt, params)
    most = drive(default_engine, search)
    assert search.done
    assert len(search.hypotheses) == 8
    assert blocks_for(300) < most <= 300 // 64 + 8 * (blocks_for(340) - 300 // 64)  # 20
    assert 2 * most < 8 * blocks_for(340)  # 48: those of separate requests
    assert is_idle(default_engine)


@pytest.fixture(scope="module")
def folder(tiny_llama, make_quantized):
    return make_quantized(tiny_llama, "a8w8c8")


TEXTS = ["def add(a, b):\n", "class Node:\n" * 9, "import os\n" * 12, "x = 1\n" * 30]
WIDE = BeamParams(beam_width=5, n=5, max_tokens=100, ignore_eos=True)


@pytest.mark.parametrize(("seed", "blocks"), [(0, 9), (1, 9), (2, 9), (3, 16), (4, 64)])
def test_searches_and_requests_that_come_and_leave_in_any_order(folder, seed, blocks):
    """Also in a cache that is too small for them all that stay end, with what they give alone."""
    rng = random.Random(seed)
    sizes = {"max_batch_size": 14, "max_batched_tokens": 60, "max_model_len": 300}
    engine, reference = engine_of(folder, kv_blocks=blocks, **sizes), engine_of(folder)
    searches, done, left = [], {}, set()
    plain = [SamplingParams(max_tokens=9, temperature=float(i % 2), seed=i) for i in range(18)]
    for i in range(18):
        width = rng.randint(1, 4)
        params = BeamParams(
            beam_width=width, n=width, max_tokens=rng.randint(1, 70), ignore_eos=True
        )
        prompt = [rng.randrange(1, 384)] * rng.randint(1, 90)
        searches.append((prompt, BeamSearch(engine, prompt, params, name=f"beams-{i}")))
        engine.add_request(prompt, plain[i], request_id=f"plain-{i}")
    for _ in range(4000):
        result = engine.advance()
        done |= {output.request_id: output for output in result.finished}
        for _, search in searches:
            search.take(result)
        live = [search for _, search in searches if not search.done]
        if live and rng.random() < 0.02:
            left.add((leaving := rng.choice(live)).name)
            leaving.abort()
        if not engine.has_unfinished:
            break
    assert is_idle(engine)
    assert engine.stats().preemptions > 0 or blocks == 64
    for prompt, search in searches:
        if search.name not in left:
            assert [search.hypotheses] == beam_search(reference, [prompt], search.params)
    for i, (prompt, _) in enumerate(searches):
        want = reference.generate([prompt], plain[i])[0].token_ids
        assert done[f"plain-{i}"].token_ids == want


@pytest.fixture
def engine(folder):
    """One that is idle in the end."""
    made = engine_of(folder)
    yield made
    assert is_idle(made)


@pytest.mark.parametrize("steps", [0, 1, 2, 30])
def test_a_search_that_is_aborted_leaves_nothing(engine, steps):
    search = BeamSearch(engine, TEXTS[1], WIDE)
    for _ in range(steps):
        search.take(engine.advance())
    assert not search.done
    search.abort()
    search.abort()
    assert search.done


def test_a_search_ends_where_the_model_length_does(folder):
    engine = engine_of(folder, max_model_len=20)
    found = beam_search(engine, [[5] * 14], WIDE)[0]
    assert {len(h.token_ids) for h in found} == {6}
    assert {h.finish_reason for h in found} == {"length"}


def test_logits_that_are_not_finite_end_the_search_only(engine, monkeypatch):
    search, other = BeamSearch(engine, TEXTS[0], WIDE), BeamSearch(engine, TEXTS[1], WIDE)
    drive(engine, search, steps=6)
    run = engine.loop.forward
    monkeypatch.setattr(engine.loop, "forward", lambda batch: run(batch).index_fill(0, torch.tensor([2]), torch.nan))  # fmt: skip
    search.take(result := engine.advance())
    other.take(result)
    monkeypatch.undo()
    assert search.done
    assert "NaN" in search.error
    assert not other.done
    other.abort()


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": 33}, "beam_width"),
        ({"beam_width": True}, "beam_width"),
        ({"n": 5}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"length_penalty": float("nan")}, "length_penalty"),
        ({"early_stopping": "sometimes"}, "early_stopping"),
        ({"early_stopping": 1}, "early_stopping"),
        ({"logprobs": 101}, "logprobs"),
        ({"temperature": 1.0}, "temperature"),
    ],
)
def test_parameters_that_are_not_allowed(values, param):
    with pytest.raises(RequestError, match=rf"^{param}: ") as caught:
        BeamParams(**values)
    assert caught.value.param == param


def test_parameters_cross_between_processes():
    assert pickle.loads(pickle.dumps(WIDE)) == WIDE


@pytest.mark.parametrize(
    ("sizes", "values", "words"),
    [
        ({"max_batch_size": 3}, {}, "beam_width: 5 beams .* max_batch_size is 3"),
        ({"kv_blocks": 8}, {}, "beam_width: 5 beams of 100 tokens .* 11 blocks .* has 8"),
        ({}, {"stop_token_ids": (999,)}, "stop_token_ids: token 999"),
    ],
)
def test_beams_that_do_not_fit_are_refused_before_they_run(folder, sizes, values, words):
    engine = engine_of(folder, max_model_len=300, **sizes)
    with pytest.raises(RequestError, match=words):
        beam_search(engine, [[1] * 70, [2] * 100], WIDE.model_copy(update=values))
    assert is_idle(engine)


def test_beams_that_would_hide_the_steps_of_others_are_refused(engine):
    engine.add_request("x", SamplingParams(max_tokens=2))
    with pytest.raises(EngineError, match="other requests run"):
        beam_search(engine, ["x"], WIDE)
    assert len([o for _ in range(2) for o in engine.step()]) == 2


def test_a_failed_step_is_told(engine, monkeypatch):
    monkeypatch.setattr(engine.loop, "forward", lambda batch: 1 / 0)
    with pytest.raises(EngineError, match="division by zero"):
        beam_search(engine, ["x"], WIDE)
    monkeypatch.undo()
    assert len(beam_search(engine, ["x"], WIDE)[0]) == 5


def test_held_requests_that_wait_for_each_other_are_no_deadlock():
    """Without a place for its fork, the first waits for it, and the fork for the second."""
    scheduler = Scheduler(BlockManager(4), max_batch_size=2, max_batched_tokens=999)
    first, second = (Sequence(name, [1] * 65, held=True) for name in ("first", "second"))
    scheduler.add(first)
    scheduler.add(second)
    scheduler.advance(scheduler.schedule())
    fork = first.fork("fork")
    fork.append(2)
    scheduler.fork(first, fork)
    work = scheduler.schedule()
    assert (work.places.tolist(), work.starts.tolist()) == ([fork.place], [0])
    assert list(scheduler.waiting) == [second]
